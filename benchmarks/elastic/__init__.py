"""Does scaling attention and experts apart save devices, and what does a real suite do that scales?"""
