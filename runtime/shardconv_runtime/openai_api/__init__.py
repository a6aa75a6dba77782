"""Requests and answers of OpenAI's API, and how models write them: templates, calls of tools, grammars."""
