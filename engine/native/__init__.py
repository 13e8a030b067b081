"""All C++ of the repository: one library, built once per machine (`build`), called by ctypes
(`library`).

src/kernels a model's forward pass on a CPU, sampling src/transfer copies, conversion, checksums and
encrypted streams of KV; a store's disk tier src/router the index of cached prefixes, and the choice
of a worker for the next request src/text writes the tokens of many streams, as bytes, to their
sockets src/ngrams finds the tokens that followed the same tokens earlier src/peaks measures the
peak speed of a processor
"""
