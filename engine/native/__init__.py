"""All C++ of the tree: one library, built once per machine (`build`), called by ctypes (`library`).

src/kernels    a model's forward pass on a CPU, sampling
src/transfer   copies, conversion, checksums and sealed streams of KV; a store's disk
src/router     where prefixes are, and where the next request goes
src/text       tokens of many streams to bytes on their sockets
src/ngrams     tokens that followed the same tokens before
src/peaks      what a processor can do at best
"""
