"""The HTTP server: OpenAI's API over the engine's thread, adapters loaded while it runs."""
