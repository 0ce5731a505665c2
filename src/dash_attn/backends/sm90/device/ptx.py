"""Single PTX instructions that CuTe-DSL has no call for, one function each."""

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm(result, operands, text, constraints, loc=None, ip=None):
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _address(pointer, loc, ip):
    return pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)


@dsl_user_op
def load_acquire(pointer: cute.Pointer, *, loc=None, ip=None) -> Int32:
    """ld.acquire.gpu of one int32."""
    text = "ld.acquire.gpu.global.b32 $0, [$1];"
    return Int32(_asm(T.i32(), [_address(pointer, loc, ip)], text, "=r,l,~{memory}", loc, ip))


@dsl_user_op
def quotient(number: Int32, divisor: Int32, *, loc=None, ip=None) -> Int32:
    """div.u32, rounded down. Neither is negative: half of the instructions of a signed division."""
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (number, divisor)]
    return Int32(_asm(T.i32(), operands, "div.u32 $0, $1, $2;", "=r,r,r", loc, ip))


@dsl_user_op
def is_over(barrier: cute.Pointer, phase: Int32, *, loc=None, ip=None) -> Int32:
    """mbarrier.test_wait.parity: 1 if the phase is over, 0 if not; nobody waits."""
    wait = "mbarrier.test_wait.parity.shared::cta.b64 over, [$1], $2;"
    text = f"{{ .reg .pred over; {wait} selp.s32 $0, 1, 0, over; }}"
    operands = [barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), Int32(phase).ir_value(loc=loc, ip=ip)]
    return Int32(_asm(T.i32(), operands, text, "=r,r,r,~{memory}", loc, ip))


@dsl_user_op
def add_release(pointer: cute.Pointer, *, loc=None, ip=None) -> None:
    """red.release.gpu: add 1."""
    text = "red.release.gpu.global.add.s32 [$0], 1;"
    _asm(None, [_address(pointer, loc, ip)], text, "l,~{memory}", loc, ip)


@dsl_user_op
def store_release(pointer: cute.Pointer, value: Int32, *, loc=None, ip=None) -> None:
    """st.release.gpu of one int32."""
    operands = [_address(pointer, loc, ip), Int32(value).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "st.release.gpu.global.b32 [$0], $1;", "l,r,~{memory}", loc, ip)


@dsl_user_op
def sleep(*, loc=None, ip=None) -> None:
    """nanosleep, about 100 ns."""
    _asm(None, [], "nanosleep.u32 100;", "~{memory}", loc, ip)


@dsl_user_op
def add(pointer: cute.Pointer, amount: int | Int32 = 1, *, loc=None, ip=None) -> Int32:
    """atom.relaxed.gpu: add, return the old value."""
    text = "atom.relaxed.gpu.global.add.s32 $0, [$1], $2;"
    operands = [_address(pointer, loc, ip), Int32(amount).ir_value(loc=loc, ip=ip)]
    return Int32(_asm(T.i32(), operands, text, "=r,l,r,~{memory}", loc, ip))


@dsl_user_op
def set_bits(pointer: cute.Pointer, bits: Int32, *, loc=None, ip=None) -> None:
    """red.relaxed.gpu: or."""
    operands = [_address(pointer, loc, ip), Int32(bits).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "red.relaxed.gpu.global.or.b32 [$0], $1;", "l,r,~{memory}", loc, ip)


@dsl_user_op
def highest_bit(bits: Int32, *, loc=None, ip=None) -> Int32:
    """bfind: number of the highest bit that is 1."""
    return Int32(_asm(T.i32(), [Int32(bits).ir_value(loc=loc, ip=ip)], "bfind.u32 $0, $1;", "=r,r", loc, ip))


@dsl_user_op
def highest_bit_of_64(bits: Int64, *, loc=None, ip=None) -> Int32:
    """bfind: number of the highest bit that is 1; -1 if none is."""
    return Int32(_asm(T.i32(), [Int64(bits).ir_value(loc=loc, ip=ip)], "bfind.u64 $0, $1;", "=r,l", loc, ip))


@dsl_user_op
def count_of_64(bits: Int64, *, loc=None, ip=None) -> Int32:
    """popc: how many bits are 1."""
    return Int32(_asm(T.i32(), [Int64(bits).ir_value(loc=loc, ip=ip)], "popc.b64 $0, $1;", "=r,l", loc, ip))


@dsl_user_op
def add_f32x4(pointer: cute.Pointer, values, *, loc=None, ip=None) -> None:
    """red.relaxed.gpu: add four fp32 to memory, at a multiple of 16 bytes."""
    operands = [_address(pointer, loc, ip)] + [value.ir_value(loc=loc, ip=ip) for value in values]
    text = "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
    _asm(None, operands, text, "l,f,f,f,f,~{memory}", loc, ip)


@dsl_user_op
def add_shared(pointer: cute.Pointer, amount: Int32, *, loc=None, ip=None) -> Int32:
    """atom.shared: add, return the old value."""
    text = "atom.relaxed.cta.shared::cta.add.s32 $0, [$1], $2;"
    operands = [_address(pointer, loc, ip), Int32(amount).ir_value(loc=loc, ip=ip)]
    return Int32(_asm(T.i32(), operands, text, "=r,r,r,~{memory}", loc, ip))


@dsl_user_op
def max_shared(pointer: cute.Pointer, value: Int32, *, loc=None, ip=None) -> None:
    """red.shared: keep the larger one."""
    operands = [_address(pointer, loc, ip), Int32(value).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "red.relaxed.cta.shared::cta.max.s32 [$0], $1;", "r,r,~{memory}", loc, ip)


@dsl_user_op
def compare_and_swap(pointer: cute.Pointer, old: Int32, new: Int32, *, loc=None, ip=None) -> Int32:
    """atom.cas of one int32, returns the value found."""
    text = "atom.relaxed.gpu.global.cas.b32 $0, [$1], $2, $3;"
    operands = [
        _address(pointer, loc, ip),
        Int32(old).ir_value(loc=loc, ip=ip),
        Int32(new).ir_value(loc=loc, ip=ip),
    ]
    return Int32(_asm(T.i32(), operands, text, "=r,l,r,r,~{memory}", loc, ip))


@dsl_user_op
def bulk_store(shared: cute.Pointer, target: cute.Pointer, size: int, *, loc=None, ip=None) -> None:
    """cp.async.bulk shared to global, `size` bytes, joins the current bulk group."""
    text = f"cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], {size};"
    _asm(None, [_address(target, loc, ip), _address(shared, loc, ip)], text, "l,r,~{memory}", loc, ip)


@dsl_user_op
def bulk_add_f32(shared: cute.Pointer, target: cute.Pointer, size: int, *, loc=None, ip=None) -> None:
    """cp.reduce.async.bulk add of fp32, shared to global, `size` bytes, joins the current bulk group."""
    text = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], {size};"
    _asm(None, [_address(target, loc, ip), _address(shared, loc, ip)], text, "l,r,~{memory}", loc, ip)


@dsl_user_op
def bulk_load(
    target: cute.Pointer, source: cute.Pointer, size: int | Int32, barrier: cute.Pointer, *, loc=None, ip=None
):
    """cp.async.bulk global to shared, completing `size` bytes on `barrier`."""
    operands = [_address(target, loc, ip), _address(source, loc, ip), _address(barrier, loc, ip)]
    constraints = "r,l,r,~{memory}"
    if not isinstance(size, int):
        operands.append(Int32(size).ir_value(loc=loc, ip=ip))
        size, constraints = "$3", "r,l,r,r,~{memory}"
    text = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {size}, [$2];"
    _asm(None, operands, text, constraints, loc, ip)


@dsl_user_op
def load_transposed(pointer: cute.Pointer, *, loc=None, ip=None) -> list[Int32]:
    """ldmatrix.x4.trans: of four matrices of 8 x 8 values of 16 bits, whose rows lanes 0 to 7, 8 to 15 and so
    on point to, this lane's two values each."""
    four = llvm.StructType.get_literal([T.i32()] * 4)
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
    found = _asm(four, [_address(pointer, loc, ip)], text, "=r,=r,=r,=r,r,~{memory}", loc, ip)
    return [Int32(llvm.extractvalue(T.i32(), found, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def fence_proxy_async(*, loc=None, ip=None) -> None:
    """fence.proxy.async of global memory: over all state spaces it would also wait like a membar."""
    _asm(None, [], "fence.proxy.async.global;", "~{memory}", loc, ip)


@dsl_user_op
def nanoseconds(*, loc=None, ip=None) -> Int64:
    """%globaltimer."""
    return Int64(_asm(T.i64(), [], "mov.u64 $0, %globaltimer;", "=l,~{memory}", loc, ip))


@dsl_user_op
def multiprocessor(*, loc=None, ip=None) -> Int32:
    """%smid."""
    return Int32(_asm(T.i32(), [], "mov.u32 $0, %smid;", "=r", loc, ip))


@dsl_user_op
def thread_index(*, loc=None, ip=None) -> Int32:
    """%tid.x, read here: what is computed from it takes no registers before."""
    return Int32(_asm(T.i32(), [], "mov.u32 $0, %tid.x;", "=r", loc, ip))
