"""What is known of a server, and the HTTP port to read it from, for people and Prometheus; a training's port too.

``status_model`` defines a server's status, ``overview`` merges what its shards say of a job, ``pages`` shows it, and
``http_status`` serves what it is given. May import ``protocol``.
"""
