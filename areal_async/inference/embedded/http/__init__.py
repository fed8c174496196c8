"""The engine's HTTP routes, which are SGLang's."""
