"""Pipeline parallelism: the model of a stage, its link to other stages, training and batches over stages."""
