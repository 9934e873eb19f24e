"""The chat engine: messages to an API and messages back, over OpenAI's client."""
