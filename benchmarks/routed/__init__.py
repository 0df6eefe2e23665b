"""What does choosing replicas batch by batch gain?"""
