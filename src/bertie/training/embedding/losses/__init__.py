"""Losses over the embeddings of a whole batch.

A row of a batch is a few texts and possibly a label. `columns` are the embeddings of the first text of
every row, of the second, and so on; `labels` is a tensor with the rows' labels:

    inputs      texts of a row               label of a row
    pairs       a, p  or  a, p, n1 … nk      none: p is the positive of a, the n are hard negatives
    classes     a, b                         a class, 0 to n − 1                          (B,) int64
    scores      a, b                         similarity, greater is more similar          (B,)
    triplets    a, p, n                      none: anchor, positive, negative
    lists       query, p1 … pk               a teacher's score of each passage            (B, k)
    vectors     a                            a teacher's embedding                        (B, D')
    labels      a                            a class; texts of one class are similar      (B,) int64

| loss | name | inputs | sentence-transformers |
|---|---|---|---|
| `InfoNCELoss` | infonce | pairs | MultipleNegativesRankingLoss |
| `TripletLoss` | triplet | triplets | TripletLoss |
| `SoftmaxLoss` | softmax | classes | SoftmaxLoss |
| `CosineSimilarityLoss` | cosine | scores | CosineSimilarityLoss |
| `CoSENTLoss` | cosent | scores | CoSENTLoss |
| `ContrastiveLoss` | contrastive | scores | ContrastiveLoss |
| `MarginMSELoss` | margin-mse | lists | MarginMSELoss |
| `KLDivergenceLoss` | kl | lists | DistillKLDivLoss |
| `MatryoshkaLoss` | | of the inner loss | MatryoshkaLoss |
| `SpladeLoss` | | of the inner loss | SpladeLoss |
| `SimilarityDistillationLoss` | | vectors | |
| `SupervisedContrastiveLoss` | | labels | |

Embeddings are float32. A loss is the mean over the rows. In distributed training each process passes
its own rows, and every process must call the loss: the mean of their losses and gradients, weighted by
their rows, equals that of one process with all rows. Since gradients cross processes in the backward
pass, a weight must multiply the loss, not the gradients afterwards.
"""

from bertie.training.embedding.losses.base import EmbeddingLoss, Inputs
from bertie.training.embedding.losses.distillation import (
    KLDivergenceLoss,
    MarginMSELoss,
    SimilarityDistillationLoss,
    similarity_distillation,
)
from bertie.training.embedding.losses.infonce import InfoNCELoss
from bertie.training.embedding.losses.labels import SupervisedContrastiveLoss
from bertie.training.embedding.losses.pairs import (
    ContrastiveLoss,
    CoSENTLoss,
    CosineSimilarityLoss,
    SoftmaxLoss,
    TripletLoss,
)
from bertie.training.embedding.losses.wrappers import MatryoshkaLoss, SpladeLoss

__all__ = [
    "LOSSES",
    "CoSENTLoss",
    "ContrastiveLoss",
    "CosineSimilarityLoss",
    "EmbeddingLoss",
    "InfoNCELoss",
    "Inputs",
    "KLDivergenceLoss",
    "MarginMSELoss",
    "MatryoshkaLoss",
    "SimilarityDistillationLoss",
    "SoftmaxLoss",
    "SpladeLoss",
    "SupervisedContrastiveLoss",
    "TripletLoss",
    "similarity_distillation",
]

LOSSES: dict[str, type[EmbeddingLoss]] = {  # by the name that recipes and the command line use
    "infonce": InfoNCELoss,
    "triplet": TripletLoss,
    "softmax": SoftmaxLoss,
    "cosine": CosineSimilarityLoss,
    "cosent": CoSENTLoss,
    "contrastive": ContrastiveLoss,
    "margin-mse": MarginMSELoss,
    "kl": KLDivergenceLoss,
}
