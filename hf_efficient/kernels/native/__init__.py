"""C++ libraries: compiled on the machine that runs them, loaded, called through ctypes."""
