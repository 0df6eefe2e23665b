"""What do operators see of the cluster, and who tells the gateway?"""
