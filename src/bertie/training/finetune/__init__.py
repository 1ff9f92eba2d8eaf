"""Fine-tuning on labelled data: classification, regression, token classification, question answering, reranking."""
