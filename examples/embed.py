"""sentence-transformers: torchrun --nproc-per-node 2 embed.py [MODEL]"""

import os
import sys

from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer

import tp_transformers

tp_transformers.enable()
name = sys.argv[1] if len(sys.argv) > 1 else "sentence-transformers/all-MiniLM-L6-v2"
words = Transformer(name, model_args={"tp_plan": "auto", "dtype": "float32"})
device = str(words.auto_model.device)
model = SentenceTransformer(modules=[words, Pooling(words.get_word_embedding_dimension())], device=device)
vectors = model.encode(["The sky is blue.", "Grass is green.", "The heavens are blue."], normalize_embeddings=True)
if os.environ.get("RANK", "0") == "0":
    print("similarities", *(vectors @ vectors.T)[0].tolist())
