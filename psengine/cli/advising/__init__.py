"""What ``psengine advise`` makes of a timeline. Pure."""
