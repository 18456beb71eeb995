"""Step times from a timeline, and the advice drawn from them; pure, but for the exchange with a server."""
