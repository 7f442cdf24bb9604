"""Process groups and the channels between pipeline ranks."""
