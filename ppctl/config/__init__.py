"""The closed configuration: its schema, how it is composed and checked."""
