"""The calls of real clients, as their documentation has them; only the address and the name of the model are Bertie's.

Each function makes one call and checks its result. Packages are imported where they are used, so that one that is
missing fails alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

MODEL = "bertie-small"
COHERE_MODEL = "embed-english-v3.0"  # the same model, for clients that accept only their vendor's names
TEXTS = ["A cat sat on the mat.", "Bread is baked in an oven.", "The feline rested on a rug."]
QUERY, PASSAGES = "What do cats eat?", ["Bread is baked in an oven.", "Cats eat meat and fish.", "It rained all day."]
CLOZE, REVIEW = "Paris is the [MASK] of France.", "A delight from start to finish."
SENTENCE = "Ada Lovelace was born in London."
QUESTION, CONTEXT = "Who wrote Emma?", "Emma is a novel by Jane Austen."
NEWS, LABELS = "The match ended in a draw after extra time.", ["sports", "politics", "cooking"]


@dataclass(frozen=True)
class Call:
    """A call of a client: the package, what is called, and the function that does it."""

    package: str
    name: str
    run: Callable[[str], None]


CALLS: list[Call] = []


def call(package: str, name: str) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """Add a function to the table. It gets the URL of the server."""

    def add(run: Callable[[str], None]) -> Callable[[str], None]:
        CALLS.append(Call(package, name, run))
        return run

    return add


def same_embeddings(url: str, found: Any, texts: list[str] = TEXTS) -> None:
    """The embeddings must be those of POST /embed."""
    wanted = httpx.post(f"{url}/embed", json={"inputs": texts}, timeout=60).raise_for_status().json()
    np.testing.assert_allclose(np.array(found, dtype=np.float64), wanted, atol=1e-5)


# --- OpenAI ---


@call("openai", "OpenAI().embeddings.create")
def openai_embeddings(url: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    same_embeddings(url, [row.embedding for row in client.embeddings.create(model=MODEL, input=TEXTS).data])


@call("openai", "OpenAI().models.list")
def openai_models(url: str) -> None:
    from openai import OpenAI

    assert MODEL in [model.id for model in OpenAI(base_url=f"{url}/v1", api_key="none").models.list()]


@call("openai", "AsyncOpenAI().embeddings.create")
def openai_async(url: str) -> None:
    import asyncio

    from openai import AsyncOpenAI

    async def embed() -> Any:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            return await client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")

    same_embeddings(url, [row.embedding for row in asyncio.run(embed()).data])


# --- Hugging Face ---


def hugging_face(url: str) -> Any:
    from huggingface_hub import InferenceClient

    return InferenceClient(url)


@call("huggingface_hub", "InferenceClient(URL).feature_extraction")
def feature_extraction(url: str) -> None:
    same_embeddings(url, hugging_face(url).feature_extraction(TEXTS))


@call("huggingface_hub", "InferenceClient(URL).sentence_similarity")
def sentence_similarity(url: str) -> None:
    scores = hugging_face(url).sentence_similarity(TEXTS[0], TEXTS[1:])
    assert scores[1] > scores[0]


@call("huggingface_hub", "InferenceClient(URL).fill_mask")
def fill_mask(url: str) -> None:
    best = hugging_face(url).fill_mask(CLOZE)[0]
    assert (best.token_str, best.sequence) == ("capital", "Paris is the capital of France.")


@call("huggingface_hub", "InferenceClient(URL).text_classification")
def text_classification(url: str) -> None:
    assert hugging_face(url).text_classification(REVIEW)[0].label == "positive"


@call("huggingface_hub", "InferenceClient(URL).token_classification(…, aggregation_strategy=…)")
def token_classification(url: str) -> None:
    spans = hugging_face(url).token_classification(SENTENCE, aggregation_strategy="first")
    assert [(span.entity_group, span.word) for span in spans] == [("PER", "Ada Lovelace"), ("LOC", "London")]


@call("huggingface_hub", "InferenceClient(URL/pipeline/token-classification).token_classification")
def token_classification_by_path(url: str) -> None:
    spans = hugging_face(f"{url}/pipeline/token-classification").token_classification(SENTENCE)
    assert [span.word for span in spans] == ["Ada Lovelace", "London"]


@call("huggingface_hub", "InferenceClient(URL).question_answering")
def question_answering(url: str) -> None:
    answer = hugging_face(url).question_answering(question=QUESTION, context=CONTEXT)
    assert (answer.answer, CONTEXT[answer.start : answer.end]) == ("Jane Austen", "Jane Austen")


@call("huggingface_hub", "InferenceClient(URL).zero_shot_classification")
def zero_shot_classification(url: str) -> None:
    labels = hugging_face(url).zero_shot_classification(NEWS, LABELS)
    assert (labels[0].label, len(labels)) == ("sports", 3)


# --- text-embeddings-inference and Amazon SageMaker, which have no client of their own ---


@call("httpx", "POST /, /embed, /embeddings, /invocations, /predict, /rerank, /similarity; GET /ping, /docs, …")
def text_embeddings_inference(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        for path in ("/health", "/ping", "/info", "/metrics", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200
        for path in ("/", "/embed", "/invocations"):
            same_embeddings(url, client.post(path, json={"inputs": TEXTS, "truncate": False}).json())
        rows = client.post("/embeddings", json={"input": TEXTS, "model": MODEL}).json()["data"]
        same_embeddings(url, [row["embedding"] for row in rows])
        assert client.post("/predict", json={"inputs": REVIEW}).json()[0]["label"] == "positive"
        assert client.post("/rerank", json={"query": QUERY, "texts": PASSAGES}).json()[0]["index"] == 1
        pair = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
        assert len(client.post("/similarity", json={"inputs": pair}).json()) == 2


# --- Cohere ---


@call("cohere", "ClientV2().embed")
def cohere_embed(url: str) -> None:
    import cohere

    client = cohere.ClientV2(api_key="none", base_url=url)
    reply = client.embed(model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=["float"])
    same_embeddings(url, reply.embeddings.float_)


@call("cohere", "ClientV2().rerank")
def cohere_rerank(url: str) -> None:
    import cohere

    reply = cohere.ClientV2(api_key="none", base_url=url).rerank(model=MODEL, query=QUERY, documents=PASSAGES, top_n=2)
    assert (reply.results[0].index, len(reply.results)) == (1, 2)


@call("cohere", "Client().embed")
def cohere_embed_v1(url: str) -> None:
    import cohere

    reply = cohere.Client(api_key="none", base_url=url).embed(model=MODEL, texts=TEXTS, input_type="search_document")
    same_embeddings(url, reply.embeddings)


@call("cohere", "Client().rerank")
def cohere_rerank_v1(url: str) -> None:
    import cohere

    reply = cohere.Client(api_key="none", base_url=url).rerank(model=MODEL, query=QUERY, documents=PASSAGES)
    assert reply.results[0].index == 1


# --- LangChain ---


@call("langchain-openai", "OpenAIEmbeddings(check_embedding_ctx_length=False)")
def langchain_openai(url: str) -> None:
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(model=MODEL, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False)
    same_embeddings(url, embeddings.embed_documents(TEXTS))
    same_embeddings(url, [embeddings.embed_query(TEXTS[0])], TEXTS[:1])


@call("langchain-community", "InfinityEmbeddings")
def langchain_infinity(url: str) -> None:
    from langchain_community.embeddings import InfinityEmbeddings

    embeddings = InfinityEmbeddings(model=MODEL, infinity_api_url=f"{url}/v1")
    same_embeddings(url, embeddings.embed_documents(TEXTS))


@call("langchain-cohere", "CohereEmbeddings")
def langchain_cohere(url: str) -> None:
    from langchain_cohere import CohereEmbeddings

    embeddings = CohereEmbeddings(model=MODEL, base_url=url, cohere_api_key="none")
    same_embeddings(url, embeddings.embed_documents(TEXTS))
    same_embeddings(url, [embeddings.embed_query(TEXTS[0])], TEXTS[:1])


@call("langchain-cohere", "CohereRerank.compress_documents")
def langchain_rerank(url: str) -> None:
    from langchain_cohere import CohereRerank
    from langchain_core.documents import Document

    reranker = CohereRerank(model=MODEL, base_url=url, cohere_api_key="none", top_n=2)
    documents = reranker.compress_documents([Document(page_content=text) for text in PASSAGES], QUERY)
    assert documents[0].page_content == PASSAGES[1]


# --- LlamaIndex ---


@call("llama-index-embeddings-openai-like", "OpenAILikeEmbedding")
def llama_index_openai(url: str) -> None:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    embedding = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{url}/v1", api_key="none")
    same_embeddings(url, embedding.get_text_embedding_batch(TEXTS))


@call("llama-index-embeddings-text-embeddings-inference", "TextEmbeddingsInference")
def llama_index_tei(url: str) -> None:
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    embedding = TextEmbeddingsInference(model_name=MODEL, base_url=url)
    same_embeddings(url, embedding.get_text_embedding_batch(TEXTS))
    same_embeddings(url, [embedding.get_query_embedding(TEXTS[0])], TEXTS[:1])


@call("llama-index-embeddings-huggingface-api", "HuggingFaceInferenceAPIEmbedding")
def llama_index_hugging_face(url: str) -> None:
    from llama_index.embeddings.huggingface_api import HuggingFaceInferenceAPIEmbedding

    embedding = HuggingFaceInferenceAPIEmbedding(model_name=url)
    same_embeddings(url, [embedding.get_text_embedding(TEXTS[0])], TEXTS[:1])


@call("llama-index-embeddings-cohere", "CohereEmbedding")
def llama_index_cohere(url: str) -> None:
    from llama_index.embeddings.cohere import CohereEmbedding

    embedding = CohereEmbedding(api_key="none", model_name=COHERE_MODEL, base_url=url)
    same_embeddings(url, embedding.get_text_embedding_batch(TEXTS))


@call("llama-index-postprocessor-tei-rerank", "TextEmbeddingInference")
def llama_index_tei_rerank(url: str) -> None:
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

    reranker = TextEmbeddingInference(base_url=url, top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in PASSAGES]
    assert reranker.postprocess_nodes(nodes, query_str=QUERY)[0].node.get_content() == PASSAGES[1]


@call("llama-index-postprocessor-cohere-rerank", "CohereRerank")
def llama_index_cohere_rerank(url: str) -> None:
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.postprocessor.cohere_rerank import CohereRerank

    reranker = CohereRerank(api_key="none", model=MODEL, base_url=url, top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in PASSAGES]
    assert reranker.postprocess_nodes(nodes, query_str=QUERY)[0].node.get_content() == PASSAGES[1]


# --- Haystack ---


def haystack_documents() -> Any:
    from haystack import Document

    return [Document(content=text) for text in TEXTS]


@call("haystack-ai", "OpenAIDocumentEmbedder")
def haystack_openai(url: str) -> None:
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
    from haystack.utils import Secret

    options: Any = {"api_key": Secret.from_token("none"), "model": MODEL, "api_base_url": f"{url}/v1"}
    documents = OpenAIDocumentEmbedder(**options).run(haystack_documents())["documents"]
    same_embeddings(url, [document.embedding for document in documents])
    same_embeddings(url, [OpenAITextEmbedder(**options).run(TEXTS[0])["embedding"]], TEXTS[:1])


@call("huggingface-api-haystack", "HuggingFaceAPIDocumentEmbedder(text_embeddings_inference)")
def haystack_tei(url: str) -> None:
    from haystack_integrations.components.embedders.huggingface_api import HuggingFaceAPIDocumentEmbedder

    embedder = HuggingFaceAPIDocumentEmbedder(api_type="text_embeddings_inference", api_params={"url": url}, token=None)
    documents = embedder.run(haystack_documents())["documents"]
    same_embeddings(url, [document.embedding for document in documents])


@call("huggingface-api-haystack", "HuggingFaceTEIRanker")
def haystack_ranker(url: str) -> None:
    from haystack import Document
    from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

    ranker = HuggingFaceTEIRanker(url=url, top_k=2, token=None)
    ranked = ranker.run(query=QUERY, documents=[Document(content=text) for text in PASSAGES])["documents"]
    assert ranked[0].content == PASSAGES[1]


@call("cohere-haystack", "CohereDocumentEmbedder")
def haystack_cohere(url: str) -> None:
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.cohere import CohereDocumentEmbedder

    embedder = CohereDocumentEmbedder(api_key=Secret.from_token("none"), model=MODEL, api_base_url=url)
    same_embeddings(url, [document.embedding for document in embedder.run(haystack_documents())["documents"]])


@call("cohere-haystack", "CohereRanker")
def haystack_cohere_ranker(url: str) -> None:
    from haystack import Document
    from haystack.utils import Secret
    from haystack_integrations.components.rankers.cohere import CohereRanker

    ranker = CohereRanker(api_key=Secret.from_token("none"), model=MODEL, api_base_url=url, top_k=2)
    ranked = ranker.run(query=QUERY, documents=[Document(content=text) for text in PASSAGES])["documents"]
    assert ranked[0].content == PASSAGES[1]


@call("jina-haystack", "JinaDocumentEmbedder")
def haystack_jina(url: str) -> None:
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.jina import JinaDocumentEmbedder

    embedder = JinaDocumentEmbedder(
        api_key=Secret.from_token("none"), model=MODEL, base_url=f"{url}/v1/embeddings", task="retrieval.passage"
    )
    same_embeddings(url, [document.embedding for document in embedder.run(haystack_documents())["documents"]])


@call("jina-haystack", "JinaRanker")
def haystack_jina_ranker(url: str) -> None:
    from haystack import Document
    from haystack.utils import Secret
    from haystack_integrations.components.rankers.jina import JinaRanker

    ranker = JinaRanker(api_key=Secret.from_token("none"), model=MODEL, base_url=f"{url}/v1/rerank")
    ranked = ranker.run(query=QUERY, documents=[Document(content=text) for text in PASSAGES])["documents"]
    assert ranked[0].content == PASSAGES[1]


# --- Chroma ---


def chroma_finds(embedding_function: Any) -> None:
    import chromadb

    client = chromadb.EphemeralClient(chromadb.Settings(anonymized_telemetry=False))
    collection = client.get_or_create_collection(
        type(embedding_function).__name__, embedding_function=embedding_function
    )
    collection.add(ids=["0", "1", "2"], documents=PASSAGES)
    assert collection.query(query_texts=[QUERY], n_results=1)["documents"] == [[PASSAGES[1]]]


@call("chromadb", "OpenAIEmbeddingFunction")
def chroma_openai(url: str) -> None:
    from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction

    function = OpenAIEmbeddingFunction(api_key="none", model_name=MODEL, api_base=f"{url}/v1")
    same_embeddings(url, function(TEXTS))
    chroma_finds(function)


@call("chromadb", "HuggingFaceEmbeddingServer")
def chroma_hugging_face(url: str) -> None:
    from chromadb.utils.embedding_functions import HuggingFaceEmbeddingServer

    function = HuggingFaceEmbeddingServer(url=f"{url}/embed")
    same_embeddings(url, function(TEXTS))
    chroma_finds(function)


# --- LiteLLM ---


@call("litellm", 'embedding("openai/…")')
def litellm_openai(url: str) -> None:
    import litellm

    reply = litellm.embedding(model=f"openai/{MODEL}", input=TEXTS, api_base=f"{url}/v1", api_key="none")
    same_embeddings(url, [row["embedding"] for row in reply.data])


@call("litellm", 'embedding("huggingface/…")')
def litellm_hugging_face(url: str) -> None:
    import litellm

    reply = litellm.embedding(model=f"huggingface/{MODEL}", input=TEXTS, api_base=url, input_type="embed")
    same_embeddings(url, [row["embedding"] for row in reply.data])


@call("litellm", 'embedding("cohere/…")')
def litellm_cohere_embed(url: str) -> None:
    import litellm

    reply = litellm.embedding(model=f"cohere/{MODEL}", input=TEXTS, api_base=f"{url}/v2/embed", api_key="none")
    same_embeddings(url, [row["embedding"] for row in reply.data])


@call("litellm", 'rerank("cohere/…")')
def litellm_cohere(url: str) -> None:
    import litellm

    reply = litellm.rerank(model=f"cohere/{MODEL}", query=QUERY, documents=PASSAGES, api_base=url, api_key="none")
    assert reply.results[0]["index"] == 1


@call("litellm", 'rerank("huggingface/…")')
def litellm_tei_rerank(url: str) -> None:
    import litellm

    reply = litellm.rerank(model=f"huggingface/{MODEL}", query=QUERY, documents=PASSAGES, api_base=url, api_key="none")
    assert reply.results[0]["index"] == 1
