"""Adapters for other frameworks: LangChain, LlamaIndex, Haystack and spaCy.

Each module needs its framework (`pip install 'bertie[langchain]'`, `[llama-index]`, `[haystack]`, `[spacy]`) and
runs models in the same process. To use a server instead, see docs/clients.md.
"""
