"""What strategies and codecs compute, written apart from them in plain torch, for one process with all replicas."""
