"""Where are files and batches kept?"""
