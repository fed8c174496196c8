"""Whatever users write, loaded, confined and told about."""
