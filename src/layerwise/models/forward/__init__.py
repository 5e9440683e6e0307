"""Following a forward on meta tensors: what each param is, seen in what becomes of it and of its products. No values, no memory."""
