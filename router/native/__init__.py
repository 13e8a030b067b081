"""The index of all workers' blocks and the choice of a worker among thousands, in C++.

Built on first use with the machine's own compiler (`engine.native_build`), called through ctypes.
Calls take microseconds and keep Python's global lock, so nothing here is called by two threads at
once; to give the lock up and wait for it again would cost more than the call.
"""
