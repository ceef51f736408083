"""What do tests of all folders share? One file for each part of a test.

- `models.py`: small models to train, a residual layer and a decoder above all.
- `loops.py`: training and inference, step by step.
- `compare.py`: whether two results are the same, bit for bit.
- `held.py`: what is held on the device.
- `offloaded.py`: an offloaded run beside a plain one: the same, within the budget, and moved as planned.
- `instances.py`: objects that the package makes, without a path through private attributes.
- `interrupts.py`: Ctrl-C at a moment of the test's choice.
- `nursery.py`: processes of their own, and several ranks; `ranks.py`: what makes a process a rank.

Many tests are these lines, and a folder's own question in between:

    plain, model = seeded(Decoder).to(device), seeded(Decoder)
    expected = fine_tune(plain, batches, loss_of)
    with headrace.offload(model, device=device, device_memory=weight_bytes(model) // 2) as handle:
        assert_same(fine_tune(model, batches, loss_of), expected)
        assert_streamed(handle, model)
"""
