"""Chat engine, which sends messages to an API and reads the answers, with OpenAI's client."""
