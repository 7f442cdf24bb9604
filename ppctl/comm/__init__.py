"""Process groups and the channels between pipeline ranks.

groups           process groups from the grid of ranks, and numbers that all ranks learn over them
communicator     the messages of a pipeline, one by one or in batches
channels         one-way connections, also for shapes that vary; buffers: the memory that receives messages
connections      the backends that carry messages, and a rank's ends of the channels over them
modes            how a config wants messages to be sent
turns            two pieces of work that alternate at their exchanges
"""
