"""The OpenAPI document: complete, consistent, with valid examples."""

from __future__ import annotations

import json

from bertie.serve.openapi import describe_api
from bertie.serve.routes import all_routes
from tests.serve.conftest import Running

POSTS = [route for route in all_routes() if route.method == "POST"]


def test_the_openapi_document_has_every_endpoint_and_its_references_resolve(server: Running) -> None:
    found = server.client.get("/openapi.json").json()
    assert found == json.loads(json.dumps(describe_api()))
    assert {route.path for route in all_routes()} < set(found["paths"])
    names = set(found["components"]["schemas"])
    text = json.dumps(found)
    used = {piece.split('"')[0] for piece in text.split("#/components/schemas/")[1:]}
    assert used <= names
    for route in POSTS:
        body = found["paths"][route.path]["post"]["requestBody"]["content"]["application/json"]["example"]
        assert route.request is not None
        route.request.model_validate_json(json.dumps(body))


def test_other_names_of_fields_are_described() -> None:
    schemas = describe_api()["components"]["schemas"]
    assert schemas["FillRequest"]["properties"]["top_k"]["description"] == "Other names: k, top_n."
    labels = schemas["ClassifyRequest"]["properties"]["labels"]["description"]
    assert labels == "Labels for zero-shot classification. Other names: candidate_labels."
    assert "inputs" not in schemas["CohereEmbedRequest"]["properties"]["texts"].get("description", "")
