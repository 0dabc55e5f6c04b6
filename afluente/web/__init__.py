"""What is served over HTTP: the webhook receiver; the admin pages and the REST API have their place here too."""
