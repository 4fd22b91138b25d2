"""The usual advice for running out of memory, block by block, as users have it before them.

Where a block leaves something out (``...``), ``filled`` puts it in; nothing else is changed.
"""

from __future__ import annotations

MORE_MICROBATCHES = """
# 从默认值开始逐步增大
config = RoundPipeRunConfig(num_microbatch=16)  # 或 32、64...
"""

RECOMPUTE_BY_LAYER = """
config = RoundPipeRunConfig(recompute_grain="layer")
"""

SMALLER_STAGES = """
from roundpipe import ModelExecutePlan

# 降低显存限制，迫使自动划分产生更小的 stage
plan = ModelExecutePlan.auto(
    "fused", model,
    model_memory_limit=8.0,  # 限制为 8GB（默认是 GPU 显存的 60%）
)
"""

PIN_MODES = """
# 减少 CPU 内存占用（参数速度下降约 10%）
model = RoundPipe(my_model, pin_model="register")

# 模型超过 CPU 内存时，配合 mmap 加载
model = AutoModelForCausalLM.from_pretrained(
    model_path,
    torch_dtype=torch.float16,
    # 使用 mmap 加载，Linux 会按需从磁盘读取并自动替换内存页
)
model = RoundPipe(my_model_sequential, pin_model="off")
"""

ONE_CALL = """
# 原来：一次处理大 batch，num_microbatch=16
loss = model.forward_backward(input_args=(large_batch,), ...)
"""

SEVERAL_CALLS = """
# 改为：分两次处理，每次 num_microbatch=8
config = RoundPipeRunConfig(num_microbatch=8)
loss1 = model.forward_backward(input_args=(batch_part1,), ..., run_config=config)
loss2 = model.forward_backward(input_args=(batch_part2,), ..., run_config=config)
# 梯度自动累积，然后统一更新
model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
"""


def filled(block: str, *rest: str) -> str:
    """The block with its ``...`` replaced, one after the other."""
    for arguments in rest:
        before, dots, after = block.partition("), ...")
        assert dots, block
        block = f"{before}), {arguments}{after}"
    assert "), ..." not in block
    return block
