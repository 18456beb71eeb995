"""Step times from a timeline, and the advice drawn from them; pure."""
