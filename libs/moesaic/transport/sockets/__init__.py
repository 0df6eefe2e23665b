"""How do frames cross a TCP connection whose ends have proved the cluster secret?"""
