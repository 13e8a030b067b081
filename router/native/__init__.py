"""The index of all cached blocks, and placement among thousands of workers, in C++.

It is built on first use with the machine's compiler (`engine.native_build`) and called through
ctypes. Calls take microseconds and keep Python's global lock, so no two threads are in here at
once. To release the lock and wait for it again would cost more than the call.
"""
