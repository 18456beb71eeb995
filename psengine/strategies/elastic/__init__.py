"""Virtual workers: synchronous training whose averages do not depend on who computed the gradients."""
