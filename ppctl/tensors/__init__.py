"""Operations on tensors that know neither models nor process groups.

wide_dtype     the dtype of sums
tensor_halves  tensors with whole sequences, or with each rank's halves of them
host_numbers   numbers that the host reads off its device, with one wait
row_copies     copies of rows in order of a number, and their sums, each the gradient of the other; permuted rows
"""
