//! Runs single instructions, and compares each with a result from a table.
//!
//! A line has an instruction with its operands, and the result. Operands and results are integers,
//! floats with a point, or bits in hexadecimal; `~` means that the last bits may differ.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod support;

use support::Bench;

const INTEGERS: &str = "
add.s32          5 -7                     = -2
add.u32          4294967295 1             = 0
add.s16          32767 1                  = -32768
add.s64          9223372036854775807 1    = -9223372036854775808
add.sat.s32      2147483647 1             = 2147483647
sub.sat.s32      -2147483648 1            = -2147483648
sub.u32          3 5                      = 4294967294
sub.s64          3 5                      = -2
mul.lo.s32       -3 7                     = -21
mul.lo.u32       65536 65537              = 65536
mul.lo.s64       -3 7                     = -21
mul.lo.s16       300 300                  = 24464
mul.hi.s32       -2147483648 2            = -1
mul.hi.u32       4294967295 4294967295    = 4294967294
mul.hi.s64       -1 5                     = -1
mul.hi.u64       0xffffffffffffffff 0xffffffffffffffff = 0xfffffffffffffffe
mul.wide.s32     -3 7                     = -21
mul.wide.u32     4294967295 4294967295    = 18446744065119617025
mul.wide.s16     -300 300                 = -90000
mul24.lo.u32     0xff000002 3             = 6
mul24.lo.s32     0x00ffffff 3             = -3
mad.lo.s32       -3 7 1                   = -20
mad.lo.u16       300 300 1                = 24465
mad.hi.u32       4294967295 4294967295 5  = 3
mad.wide.s32     -3 7 1                   = -20
mad.wide.u32     4294967295 2 4294967296  = 12884901886
div.s32          -7 2                     = -3
div.u32          4294967295 2             = 2147483647
div.s64          -9 -2                    = 4
rem.s32          -7 2                     = -1
rem.u64          18446744073709551615 10  = 5
min.s32          -1 1                     = -1
min.u32          -1 1                     = 1
max.s64          -1 1                     = 1
max.u16          65535 1                  = 65535
abs.s32          -5                       = 5
abs.s64          -9223372036854775808     = -9223372036854775808
neg.s32          5                        = -5
neg.s16          -32768                   = -32768
sad.u32          3 9 100                  = 106
sad.s32          -3 9 100                 = 112
and.b32          0xff00ff00 0x0ff00ff0    = 0x0f000f00
or.b64           0xff00000000 0xff        = 0xff000000ff
xor.b16          0xffff 0x00ff            = 0xff00
not.b16          0x00ff                   = 0xff00
not.b32          0                        = 0xffffffff
not.b64          0                        = 0xffffffffffffffff
cnot.b32         0                        = 1
cnot.b32         9                        = 0
shl.b32          1 31                     = 0x80000000
shl.b32          1 32                     = 0
shl.b64          1 63                     = 0x8000000000000000
shl.b64          1 64                     = 0
shl.b16          1 15                     = 0x8000
shr.u32          0x80000000 31            = 1
shr.u32          0x80000000 32            = 0
shr.s32          -8 1                     = -4
shr.s32          -8 40                    = -1
shr.b64          0x8000000000000000 63    = 1
shr.s64          -8 100                   = -1
popc.b32         0xf0f0                   = 8
popc.b64         0xf0f000000000f0f0       = 16
clz.b32          1                        = 31
clz.b32          0                        = 32
clz.b64          1                        = 63
brev.b32         1                        = 0x80000000
brev.b64         1                        = 0x8000000000000000
bfind.u32        0x00010000               = 16
bfind.s32        -2                       = 0
bfind.u32        0                        = 4294967295
bfind.shiftamt.u32 0x00010000             = 15
bfe.u32          0x12345678 8 8           = 0x56
bfe.s32          0x0000f000 12 4          = -1
bfe.u32          0x12345678 28 8          = 1
bfe.u64          0x123456789abcdef0 32 16 = 0x5678
bfe.s64          0x8000000000000000 63 4  = -1
bfe.u32          0xffffffff 3 0           = 0
bfi.b32          0xab 0x12345678 8 8      = 0x1234ab78
bfi.b32          0xfff 0 28 8             = 0xf0000000
bfi.b64          0x1234 0xff 32 16        = 0x12340000_00ff
prmt.b32         0x33221100 0x77665544 0x5410 = 0x55441100
prmt.b32         0x33221100 0x77665544 0x0123 = 0x00112233
prmt.b32         0x80 0 0x8888            = 0xffffffff
shf.l.wrap.b32   0x80000000 1 1           = 3
shf.l.wrap.b32   0x80000000 1 33          = 3
shf.l.clamp.b32  0x80000000 1 40          = 0x80000000
shf.r.wrap.b32   0 1 1                    = 0x80000000
shf.r.clamp.b32  0 1 40                   = 1
";

const FLOATS: &str = "
add.f32          1.5 2.25                 = 3.75
add.rn.f32       16777216.0 1.0           = 16777216.0
add.rp.f32       16777216.0 1.0           = 16777218.0
add.rm.f32       -16777216.0 -1.0         = -16777218.0
add.rz.f32       16777218.0 1.0           = 16777218.0
add.sat.f32      0.75 0.75                = 1.0
sub.f32          1.0 3.5                  = -2.5
mul.f32          3.0 -0.5                 = -1.5
mul.rz.f64       3.0 -0.5                 = -1.5
mul.ftz.f32      0x00800000 0.5           = 0.0
mul.f32          0x00800000 0.5           = 0x00400000
div.rn.f32       1.0 3.0                  = 0x3eaaaaab
div.rz.f32       1.0 3.0                  = 0x3eaaaaaa
div.approx.f32   1.0 4.0                  = 0.25
div.full.f32     1.0 4.0                  = 0.25
div.rn.f64       1.0 3.0                  = 0x3fd5555555555555
div.rp.f64       1.0 3.0                  = 0x3fd5555555555556
fma.rn.f32       3.0 4.0 0.5              = 12.5
fma.rn.f32       0x3f800001 0x3f800001 0xbf800002 = 0x28800000
fma.rz.f32       16777216.0 1.0 1.0       = 16777216.0
fma.rp.f32       16777216.0 1.0 1.0       = 16777218.0
fma.rn.f64       3.0 4.0 0.5              = 12.5
min.f32          1.0 -1.0                 = -1.0
min.f32          0x7fc00000 2.0           = 2.0
min.f32          0.0 -0.0                 = 0x80000000
max.f32          -0.0 0.0                 = 0x00000000
max.f64          0x7ff8000000000000 2.0   = 2.0
min.f64          0.0 -0.0                 = 0x8000000000000000
abs.f32          -2.0                     = 2.0
neg.f32          2.0                      = -2.0
neg.f64          -0.0                     = 0x0000000000000000
copysign.f32     -1.0 5.0                 = -5.0
copysign.f64     -1.0 5.0                 = -5.0
sqrt.rn.f32      2.0                      = 0x3fb504f3
sqrt.rp.f32      2.0                      = 0x3fb504f4
sqrt.rn.f64      2.0                      = 0x3ff6a09e667f3bcd
sqrt.approx.f32  9.0                      = 3.0
rsqrt.approx.f32 4.0                      = 0.5
rsqrt.approx.f64 4.0                      = 0.5
rcp.rn.f32       3.0                      = 0x3eaaaaab
rcp.rm.f32       3.0                      = 0x3eaaaaaa
rcp.approx.ftz.f32 4.0                    = 0.25
rcp.approx.ftz.f64 4.0                    = 0.25
rcp.rn.f64       4.0                      = 0.25
ex2.approx.f32   3.0                      = 8.0
ex2.approx.ftz.f32 -150.0                 = 0.0
lg2.approx.f32   8.0                      = 3.0
sin.approx.f32   0.5                      ~ 0.47942555
cos.approx.f32   0.5                      ~ 0.8775826
tanh.approx.f32  0.5                      ~ 0.46211717
testp.finite.f32 0x7f800000               = 0
testp.infinite.f32 0x7f800000             = 1
testp.notanumber.f64 0x7ff8000000000000   = 1
testp.normal.f32 0x00000001               = 0
testp.subnormal.f32 0x00000001            = 1
add.f32          0x7f800000 0xff800000    = 0x7fffffff
";

/// A conversion has the types of its result and its operand.
const CONVERSIONS: &str = "
cvt.rni.s32.f32  2.5                      = 2
cvt.rni.s32.f32  -3.5                     = -4
cvt.rzi.s32.f32  -2.9                     = -2
cvt.rmi.s32.f32  -2.1                     = -3
cvt.rpi.u32.f32  2.1                      = 3
cvt.rzi.u32.f32  -5.0                     = 0
cvt.rzi.s64.f64  -1e300                   = -9223372036854775808
cvt.rzi.u64.f64  1e19                     = 10000000000000000000
cvt.rni.f32.f32  2.5                      = 2.0
cvt.rmi.f64.f64  -2.5                     = -3.0
cvt.rpi.f32.f32  -0.5                     = -0.0
cvt.rn.f32.s32   -7                       = -7.0
cvt.rn.f32.u32   4294967295               = 4294967296.0
cvt.rz.f32.u32   4294967295               = 4294967040.0
cvt.rn.f64.u64   18446744073709551615     = 18446744073709551616.0
cvt.rn.f64.s32   -7                       = -7.0
cvt.rn.f32.f64   0.1                      = 0x3dcccccd
cvt.rm.f32.f64   0.1                      = 0x3dcccccc
cvt.f64.f32      0.5                      = 0.5
cvt.sat.f32.f32  1.5                      = 1.0
cvt.sat.f32.f32  0x7fc00000               = 0.0
cvt.s32.s8       0x80                     = -128
cvt.u32.u8       0x180                    = 0x80
cvt.s64.s32      -7                       = -7
cvt.u64.u32      -7                       = 4294967289
cvt.u16.u32      0x12345                  = 0x2345
cvt.s8.s32       0x1ff                    = -1
cvt.sat.u8.s32   300                      = 255
cvt.sat.s16.s32  -40000                   = -32768
cvt.f32.f16      0x3c00                   = 1.0
cvt.f32.f16      0x0001                   = 0x33800000
cvt.rn.f16.f32   1.0                      = 0x3c00
cvt.rn.f16.f32   65520.0                  = 0x7c00
cvt.rz.f16.f32   65520.0                  = 0x7bff
cvt.rn.f16.s32   2049                     = 0x6800
cvt.rzi.s32.f16  0xc500                   = -5
";

/// Comparisons, as numbers 0 and 1; and selections.
const COMPARISONS: &str = "
setp.lt.s32      -1 1                     = 1
setp.lt.u32      -1 1                     = 0
setp.hi.u32      -1 1                     = 1
setp.ge.s64      -1 -1                    = 1
setp.ne.s16      1 2                      = 1
setp.eq.b32      5 5                      = 1
setp.lt.f32      1.0 2.0                  = 1
setp.ltu.f32     0x7fc00000 2.0           = 1
setp.ne.f32      0x7fc00000 2.0           = 0
setp.neu.f64     0x7ff8000000000000 2.0   = 1
setp.nan.f32     0x7fc00000 2.0           = 1
setp.num.f32     1.0 2.0                  = 1
";

fn number(text: &str, of: &str) -> u64 {
    let text = &text.replace('_', "");
    if let Some(hex) = text.strip_prefix("0x") {
        return u64::from_str_radix(hex, 16).unwrap();
    }
    match of {
        "f32" => u64::from(text.parse::<f32>().unwrap().to_bits()),
        "f64" => text.parse::<f64>().unwrap().to_bits(),
        _ => text.parse::<i128>().unwrap() as u64,
    }
}

fn bits(of: &str) -> u32 {
    of[1..].parse().unwrap_or(1)
}

/// Registers of 8 bits do not exist: such values are in wider ones.
fn register(of: &str) -> String {
    format!("b{}", bits(of).max(16))
}

/// Runs an instruction with operands, and returns its result.
fn run(name: &str, operands: &[u64], from: &[&str], to: &str) -> u64 {
    let mut text =
        String::from(".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry k(");
    text += ".param .u64 out, .param .u64 in)\n{\n.reg .b64 %rd<3>;\n.reg .pred %p;\n";
    text += &format!(".reg .{} %d;\n.reg .b64 %wide;\n", register(to));
    text += "ld.param.u64 %rd1, [out];\nld.param.u64 %rd2, [in];\n";
    let mut list = if to == "pred" { "%p".to_owned() } else { "%d".to_owned() };
    for (at, from) in from.iter().enumerate() {
        let of = register(from);
        text += &format!(".reg .{of} %s{at};\nld.global.{of} %s{at}, [%rd2+{}];\n", at * 8);
        list += &format!(", %s{at}");
    }
    text += &format!("{name} {list};\n");
    match (to, bits(to)) {
        ("pred", _) => text += "selp.u64 %wide, 1, 0, %p;\nst.global.u64 [%rd1], %wide;\n",
        (_, width) => text += &format!("st.global.b{} [%rd1], %d;\n", width.max(16)),
    }
    text += "ret;\n}\n";
    let mut bench = Bench::new(&text);
    let input = bench.upload(operands);
    let out = bench.upload(&[0u64]);
    bench.launch("k", ([1, 1], [1, 1]), 0, arguments![out, input]).unwrap();
    bench.download::<u64>(out, 1)[0]
}

/// Runs the lines of a table. `types` says which types the operands and the result have.
fn check(table: &str, types: impl Fn(&str, usize) -> (Vec<String>, String)) {
    for line in table.lines().filter(|line| !line.trim().is_empty()) {
        let (left, right) = line.split_once(['=', '~']).unwrap();
        let mut words = left.split_whitespace();
        let name = words.next().unwrap();
        let texts: Vec<&str> = words.collect();
        let (from, to) = types(name, texts.len());
        let from: Vec<&str> = from.iter().map(String::as_str).collect();
        let operands: Vec<u64> =
            texts.iter().zip(&from).map(|(text, of)| number(text, of)).collect();
        let mask = u64::MAX >> (64 - bits(&to).max(16));
        let expected = number(right.trim(), &to) & mask;
        let got = run(name, &operands, &from, &to);
        if line.contains('~') {
            assert!(got.abs_diff(expected) <= 2, "{line}: {got:#x}");
        } else {
            assert_eq!(got, expected, "{line}: {got:#x}");
        }
    }
}

/// The types of an instruction whose operands have its own type, with the usual exceptions.
fn plain(name: &str, count: usize) -> (Vec<String>, String) {
    let of = name.rsplit('.').next().unwrap();
    let mut from = vec![of.to_owned(); count];
    let wide = name.contains(".wide.");
    let doubled = format!("{}{}", &of[..1], 2 * bits(of));
    if name.starts_with("sh") || name.starts_with("bfe") || name.starts_with("bfi.") {
        let amounts = if name.starts_with("bf") { 2 } else { 1 };
        from[count - amounts..].fill("u32".to_owned());
    }
    if wide && count == 3 {
        from[2].clone_from(&doubled);
    }
    let to = match name.split('.').next().unwrap() {
        "popc" | "clz" | "bfind" => "u32".to_owned(),
        "testp" | "setp" => "pred".to_owned(),
        _ if wide => doubled,
        _ => of.to_owned(),
    };
    (from, to)
}

#[test]
fn integer_instructions_have_the_results_of_a_table() {
    check(INTEGERS, plain);
}

#[test]
fn float_instructions_have_the_results_of_a_table() {
    check(FLOATS, plain);
}

#[test]
fn comparisons_have_the_results_of_a_table() {
    check(COMPARISONS, plain);
}

#[test]
fn conversions_have_the_results_of_a_table() {
    check(CONVERSIONS, |name, _| {
        let mut words = name.rsplit('.');
        let from = words.next().unwrap().to_owned();
        (vec![from], words.next().unwrap().to_owned())
    });
}

/// A kernel that writes four words, computed by some lines.
fn words(lines: &str) -> Vec<u32> {
    let text = format!(
        ".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry k(.param .u64 out)\n{{\n\
         .reg .b64 %rd<9>;\n.reg .b32 %r<9>;\n.reg .b16 %h<9>;\n.reg .pred %p<9>;\n.reg .f32 %f<9>;\n\
         ld.param.u64 %rd0, [out];\n{lines}\nst.global.v4.u32 [%rd0], {{%r0, %r1, %r2, %r3}};\nret;\n}}\n"
    );
    let mut bench = Bench::new(&text);
    let out = bench.room::<u32>(4);
    bench.launch("k", ([1, 1], [1, 1]), 0, arguments![out]).unwrap();
    bench.download(out, 4)
}

#[test]
fn carries_pass_from_word_to_word() {
    let got = words(
        "add.cc.u32 %r0, 0xffffffff, 1; addc.cc.u32 %r1, 0xffffffff, 0; addc.u32 %r2, 5, 0;\n\
         sub.cc.u32 %r4, 0, 1; subc.u32 %r3, 10, 2;",
    );
    assert_eq!(got, [0, 0, 6, 7]);
    // (2^32 + 3) * 5 by parts of 32 bits.
    let got = words(
        "mad.lo.cc.u32 %r0, 0xffffffff, 0xffffffff, 0xffffffff;\n\
         madc.hi.u32 %r1, 0xffffffff, 0xffffffff, 0; mov.u32 %r2, 0; mov.u32 %r3, 0;",
    );
    let exact = u64::from(u32::MAX) * u64::from(u32::MAX) + u64::from(u32::MAX);
    assert_eq!(got[..2], [exact as u32, (exact >> 32) as u32]);
}

#[test]
fn registers_are_packed_and_unpacked() {
    let got = words(
        "mov.b64 %rd1, {0x11111111, 0x22222222}; mov.b64 {%r0, %r1}, %rd1;\n\
         mov.b32 {%h0, %h1}, 0x12345678; mov.b32 %r2, {%h1, %h0};\n\
         mov.b64 %rd2, {%h0, %h1, %h0, %h1}; mov.b64 {_, %r3}, %rd2;",
    );
    assert_eq!(got, [0x1111_1111, 0x2222_2222, 0x5678_1234, 0x1234_5678]);
}

#[test]
fn predicates_guard_combine_and_select() {
    let got = words(
        "setp.lt.s32 %p0|%p1, 1, 2; mov.u32 %r0, 0; @%p0 mov.u32 %r0, 7; @!%p0 mov.u32 %r0, 8;\n\
         selp.u32 %r1, 5, 6, %p1; setp.gt.and.s32 %p2|%p3, 5, 3, %p1; selp.u32 %r2, 1, 0, %p2;\n\
         setp.gt.or.s32 %p4, 1, 3, !%p1; selp.u32 %r3, 1, 0, %p4;",
    );
    assert_eq!(got, [7, 6, 0, 1]);
    let got = words(
        "set.lt.u32.f32 %r0, 0f3F800000, 0f40000000; set.gt.u32.s32 %r1, 1, 2;\n\
         set.eq.f32.s32 %f0, 3, 3; mov.b32 %r2, %f0;\n\
         and.pred %p0, %p1, %p2; not.pred %p0, %p0; selp.u32 %r3, 3, 4, %p0;",
    );
    assert_eq!(got, [u32::MAX, 0, 1f32.to_bits(), 3]);
}

#[test]
fn constants_and_branches_have_their_places() {
    let got = words(
        "mov.u32 %r0, -1; mov.f32 %f0, 0f40490FDB; mov.b32 %r1, %f0; mov.u32 %r2, WARP_SZ;\n\
         mov.u32 %r4, 2; mov.u32 %r3, 0;\nts: .branchtargets L0, L1, L2;\nbrx.idx %r4, ts;\n\
         L0: add.u32 %r3, %r3, 1;\nL1: add.u32 %r3, %r3, 10;\nL2: add.u32 %r3, %r3, 100;",
    );
    assert_eq!(got, [u32::MAX, 0x4049_0fdb, 32, 100]);
}
