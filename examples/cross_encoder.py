"""Train a cross-encoder to rerank lists of different lengths by graded relevance; print NDCG before and after."""
# python examples/cross_encoder.py  (a tiny BERT with random weights, on made-up texts; no download)

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, BertTokenizer

from bucketrank import rank_sort_loss

TOPICS = ["sport", "music", "science"]
WORDS = [f"word{k}" for k in range(60)]  # every third word belongs to a topic


def make_lists(count, generator):  # (query, documents, relevance): the share of words of the query's topic
    lists = []
    for _ in range(count):
        topic = int(torch.randint(len(TOPICS), (), generator=generator))
        documents, relevance = [], []
        for _ in range(int(torch.randint(4, 12, (), generator=generator))):
            chosen = torch.randint(len(WORDS), (6,), generator=generator)
            documents.append(" ".join(WORDS[k] for k in chosen))
            relevance.append((chosen % len(TOPICS) == topic).float().mean())
        lists.append((TOPICS[topic], documents, torch.stack(relevance)))
    return lists


def build_encoder(folder):  # returns a model and a function from text pairs to its inputs
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TOPICS, *WORDS]))
    tokenizer = BertTokenizer(str(vocabulary))
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, num_labels=1, **sizes)
    model = BertForSequenceClassification(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    try:
        from sentence_transformers import CrossEncoder
    except ImportError:  # the same network without the library's interface
        model = AutoModelForSequenceClassification.from_pretrained(folder)
    else:
        model = CrossEncoder(str(folder), num_labels=1, device="cpu").model

    def encode(pairs):
        return tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")

    return model, encode


def score(model, encode, lists):  # all documents of all lists in one batch
    return model(**encode([(query, text) for query, texts, _ in lists for text in texts])).logits[:, 0]


def ndcg(scores, relevance):
    discounts = 1 / torch.arange(2, len(scores) + 2).log2()
    ideal = (relevance.sort(descending=True).values * discounts).sum()
    return (relevance[scores.argsort(descending=True)] * discounts).sum() / ideal if ideal else torch.ones(())


@torch.no_grad()
def evaluate(model, encode, lists):
    parts = score(model.eval(), encode, lists).split([len(texts) for _, texts, _ in lists])
    return torch.stack([ndcg(part, relevance) for part, (_, _, relevance) in zip(parts, lists, strict=True)]).mean()


def main(steps=1500, batch=16, rate=1e-3):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    test = make_lists(100, generator)
    with tempfile.TemporaryDirectory() as folder:
        model, encode = build_encoder(Path(folder))
    optimiser = torch.optim.AdamW(model.parameters(), rate)
    print(f"before: NDCG {evaluate(model, encode, test):.3f}")
    for _ in range(int(steps)):
        lists = make_lists(batch, generator)
        scores, relevance = score(model.train(), encode, lists), torch.cat([grades for _, _, grades in lists])
        ranking, sorting = rank_sort_loss(scores, relevance, sizes=[len(texts) for _, texts, _ in lists])
        optimiser.zero_grad()
        (ranking + sorting).backward()
        optimiser.step()
    print(f"after: NDCG {evaluate(model, encode, test):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
