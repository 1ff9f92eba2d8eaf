"""Adapters for other frameworks: LangChain, LlamaIndex, Haystack, spaCy and scikit-learn.

Each module needs its framework (`pip install 'bertie[langchain]'`, `[llama-index]`, `[haystack]`, `[spacy]`, `[train]`)
and runs models in the same process. To use a server instead, see docs/clients.md.
"""
