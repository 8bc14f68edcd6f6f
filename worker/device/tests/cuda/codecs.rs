//! Encoders on a CUDA device, beside the code of the wire format: the same bytes and residuals.

use pushpull_common::codec::{Codec, Residual, ScaleBlocks};
use pushpull_cuda_emulator::turn::{DRIVER, DriverTurn};
use pushpull_device::{ComputeError, Device};

use crate::emulator::{Devices, with_each_grid};
use crate::testing::random;

/// The bytes of memory that an encoder must not write, or must overwrite.
const POISON: u8 = 0xff;

/// Bytes before and behind an encoded stretch. Those before are a multiple of its alignment.
const MARGIN: usize = 8;

/// More elements than all blocks of threads encode at once.
const LARGE: usize = (1 << 24) + 77_777;

/// Whether the tests use an installed driver, where large stretches are fast.
fn is_fast() -> bool {
    std::env::var(DRIVER).is_ok_and(|driver| driver == "installed")
}

/// A stretch on a device, with its residual.
///
/// Each buffer has one element more in front, so that the elements are aligned to 4 bytes alone.
struct DeviceStretch<'a> {
    device: &'a Device,
    codec: Codec,
    elements: usize,
    residual: pushpull_device::Buffer<f32>,
}

impl<'a> DeviceStretch<'a> {
    fn new(device: &'a Device, codec: Codec, elements: usize) -> DeviceStretch<'a> {
        let residual = device.buffer(1 + elements).unwrap();
        DeviceStretch { device, codec, elements, residual }
    }

    /// Encodes a gradient, checks that nothing beside the encoded stretch is written, and returns
    /// its bytes.
    fn encode(&mut self, gradient: &[f32]) -> Result<Vec<u8>, ComputeError> {
        let DeviceStretch { device, codec, elements, residual } = self;
        let bytes = Device::encoded_bytes_max(codec, *elements);
        let mut out = device.buffer(MARGIN + bytes + MARGIN)?;
        device.write(&vec![POISON; out.len()], &mut out)?;
        let padded = [&[f32::NAN], gradient].concat();
        let gradient = device.resident(&padded)?;
        device.encode(
            codec,
            gradient.view().slice(1..1 + *elements),
            residual.view_mut().slice(1..1 + *elements),
            out.view_mut().slice(MARGIN..MARGIN + bytes),
        )?;
        let mut all = vec![0; out.len()];
        device.read(&out, &mut all)?;
        let (before, rest) = all.split_at(MARGIN);
        let (stretch, behind) = rest.split_at(bytes);
        let is_untouched = [before, behind].concat().iter().all(|&byte| byte == POISON);
        assert!(is_untouched, "{elements} elements as {codec} have more than {bytes} bytes");
        let used = Device::encoded_bytes(codec, *elements, stretch).expect("a count of pairs");
        Ok(stretch[..used].to_vec())
    }

    fn residual(&self) -> Vec<f32> {
        let mut values = vec![0.0; 1 + self.elements];
        self.device.read(&self.residual, &mut values).unwrap();
        values[1..].to_vec()
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Encodes gradients one after the other with one residual, on both devices and by the code of the
/// wire format.
#[track_caller]
fn compare(
    devices: &Devices,
    codec: Codec,
    elements: usize,
    gradients: impl IntoIterator<Item = Vec<f32>>,
) {
    let mut expected = Residual::new(elements);
    let mut stretches = devices.both().map(|device| DeviceStretch::new(device, codec, elements));
    for (step, gradient) in gradients.into_iter().enumerate() {
        let mut bytes = Vec::new();
        expected.encode(&codec, ScaleBlocks::THROUGH, 0, &gradient, &mut bytes).unwrap();
        for stretch in &mut stretches {
            let what = format!("step {step}: {elements} as {codec} on {}", stretch.device);
            let found = stretch.encode(&gradient).unwrap();
            assert_eq!(found.len(), bytes.len(), "{what}");
            let place = found.iter().zip(&bytes).position(|(found, expected)| found != expected);
            assert_eq!(place, None, "byte of {what}");
            let found = bits(&stretch.residual());
            let left = bits(expected.left());
            let place = found.iter().zip(&left).position(|(found, left)| found != left);
            assert_eq!(place, None, "residual of {what}");
        }
    }
}

/// Gradients of every kind of finite elements, for one residual.
fn finite_gradients(elements: usize) -> Vec<Vec<f32>> {
    let scaled = |seed, scale: f32| -> Vec<f32> {
        random(seed, elements).into_iter().map(|value| value * scale).collect()
    };
    let each = |of: &dyn Fn(usize) -> f32| (0..elements).map(of).collect::<Vec<f32>>();
    let exponents = random(7, elements);
    let mixed = scaled(8, 1.0);
    vec![
        scaled(1, 1.0),
        // All exponents, subnormal numbers among them.
        each(&|i| mixed[i] * (exponents[i] * 138.0 - 11.0).exp2()),
        // Many equal magnitudes of both signs, and both zeros.
        each(&|i| [0.0, -0.25, 0.25, -0.0, 0.5, -0.5, 0.25][i * 5 % 7]),
        scaled(2, 1e-3),
        // Only subnormal numbers, then half of the elements zero.
        each(&|i| f32::from_bits((i as u32 * 7919) & 0x8000_ffff)),
        each(&|i| if i % 2 == 0 { mixed[i] } else { -0.0 }),
        // One sign alone.
        each(&|i| mixed[i].abs()),
        each(&|i| -mixed[i].abs()),
        vec![0.0; elements],
        // Sums beyond the largest number, in both directions, and back.
        each(&|i| if i % 3 == 0 { f32::MIN } else { f32::MAX }),
        each(&|i| if i % 3 == 0 { f32::MIN } else { f32::MAX }),
        each(&|i| if i % 5 == 0 { f32::MAX } else { mixed[i] * 1e38 }),
        scaled(3, 1.0),
    ]
}

/// Gradients at the limits of the codecs' roundings, for a residual of zeros each.
fn limits(elements: usize) -> Vec<Vec<f32>> {
    let each = |of: &dyn Fn(usize) -> f32| (0..elements).map(of).collect::<Vec<f32>>();
    let halves = [
        65_504.0,
        65_519.9,
        65_520.0,
        -65_536.0,
        1e6,
        1.000_488_3,
        1.001_464_8,
        6.103_515_6e-5,
        6.1e-5,
        5.960_464_5e-8,
        2.980_232_2e-8,
        2.980_232_6e-8,
        8.9e-8,
        -1.5e-8,
    ];
    // Between two numbers of bf16, and the largest ones.
    let brains = [
        0x3f80_8000,
        0x3f81_8000,
        0x3f80_8001,
        0x3f80_7fff,
        0x7f7f_0000,
        0x7f7f_8000,
        0x7f7f_ffff,
        0xff7f_9000,
        0x0000_8000,
        0x0001_8000,
        0x8000_8001_u32,
    ];
    vec![
        each(&|i| halves[i % halves.len()]),
        each(&|i| f32::from_bits(brains[i % brains.len()])),
        // A scale of 1, and elements halfway between two of its multiples.
        each(&|i| if i % 256 == 0 { 127.0 } else { (i % 255) as f32 / 2.0 - 63.5 }),
        // Another scale, whose inverse is rounded.
        each(&|i| if i % 256 == 0 { 3.3 } else { ((i % 127) as f32 + 0.5) * (3.3 / 127.0) }),
        // Around the smallest scale that is not zero: 127 times the smallest normal number.
        each(&|i| {
            f32::MIN_POSITIVE * if i < 256 { 126.999_99 } else { 127.0 } / (1 + i % 3) as f32
        }),
        // A scale that is rounded up from the largest number.
        each(&|i| if i % 7 == 0 { f32::MAX } else { -1e38 }),
        // Means halfway between two numbers of f32, by sums in f64. In another order the small
        // elements would not be lost: first those of one lane, then those of several.
        each(&|i| match i % 256 {
            0 => 8.0,
            1 => (-21f32).exp2(),
            i if i % 8 == 0 => (-51f32).exp2(),
            _ => 0.0,
        }),
        each(&|i| match i % 256 {
            0 => 8.0,
            1 => (-21f32).exp2(),
            _ => (-56f32).exp2(),
        }),
        // 91 elements with the mean 1.5 + 2^-24. The product with 256 / 91 is rounded to less.
        each(&|i| match i % 256 {
            0 => 0.5 + 91.0 * (-24f32).exp2(),
            1 => 2.5,
            2..91 => 1.5,
            _ => -1.0,
        }),
        vec![f32::MIN; elements],
        vec![-0.0; elements],
        vec![f32::from_bits(1); elements],
        vec![3.0; elements],
    ]
}

/// Fewer elements than a block, and than a word of bits; whole blocks, and a bit more; several
/// chunks of a top-k.
fn sizes() -> Vec<usize> {
    let mut sizes = vec![0, 1, 3, 31, 63, 65, 255, 256, 257, 1000, 2049];
    if is_fast() {
        // More chunks than are scanned at once, and than blocks of threads.
        sizes.extend([700_001, LARGE]);
    }
    sizes
}

/// More chunks of a top-k than the largest grid that is limited has blocks.
const ROUNDS: usize = 3 * 2048 + 77;

fn compare_finite(codec: Codec) {
    with_each_grid(|devices| match devices.blocks_max {
        None => compare_sizes(devices, codec),
        Some(_) => compare_rounds(devices, codec),
    });
}

fn compare_sizes(devices: &Devices, codec: Codec) {
    for elements in sizes() {
        let steps = if elements == LARGE { 3 } else { usize::MAX };
        compare(devices, codec, elements, finite_gradients(elements).into_iter().take(steps));
        for gradient in limits(elements).into_iter().take(steps) {
            compare(devices, codec, elements, [gradient]);
        }
    }
}

/// Encodes as many elements as need several rounds of each loop.
pub(crate) fn compare_rounds(devices: &Devices, codec: Codec) {
    compare(devices, codec, ROUNDS, finite_gradients(ROUNDS).into_iter().take(3));
}

#[test]
fn f16_matches_the_processor() {
    compare_finite(Codec::F16);
}

#[test]
fn bf16_matches_the_processor() {
    compare_finite(Codec::Bf16);
}

#[test]
fn int8_matches_the_processor() {
    compare_finite(Codec::Int8);
}

#[test]
fn onebit_matches_the_processor() {
    compare_finite(Codec::OneBit);
}

#[test]
fn top_k_of_few_matches_the_processor() {
    compare_finite(Codec::TopK { fraction: 0.01 });
}

#[test]
fn top_k_of_many_matches_the_processor() {
    compare_finite(Codec::TopK { fraction: 0.4 });
}

/// One pair, and all elements; the numbers around each count of ties.
#[test]
fn top_k_of_any_fraction_matches_the_processor() {
    with_each_grid(fractions);
}

fn fractions(devices: &Devices) {
    for fraction in [1e-12, 0.003, 0.5, 0.75, 0.999, 1.0] {
        compare(devices, Codec::TopK { fraction }, 300, finite_gradients(300));
    }
    let elements = 4500;
    let few = |i: usize| [0.0, 1.0, -1.0, 2.0, -0.0][i * i % 5];
    let gradient: Vec<f32> = (0..elements).map(few).collect();
    for pairs in [1, 899, 900, 901, 2700, 2701, 4499] {
        let codec = Codec::TopK { fraction: pairs as f64 / elements as f64 };
        compare(devices, codec, elements, [gradient.clone()]);
    }
}

#[test]
fn halves_keep_nan_and_infinities() {
    with_each_grid(special_halves);
}

fn special_halves(devices: &Devices) {
    let special = [
        f32::NAN.to_bits(),
        (-f32::NAN).to_bits(),
        f32::INFINITY.to_bits(),
        f32::NEG_INFINITY.to_bits(),
        0x7f80_0001,
        0xffbf_ffff,
        0x7fc1_2345,
        1.0f32.to_bits(),
    ];
    for codec in [Codec::F16, Codec::Bf16] {
        for elements in [1, 8, 301, 901] {
            let special: Vec<f32> =
                (0..elements).map(|i| f32::from_bits(special[i * 3 % 8])).collect();
            let plain = random(1, elements);
            compare(devices, codec, elements, [plain.clone(), special, plain]);
        }
    }
}

/// Such elements are the caller's fault, but no other memory may be written.
#[test]
fn nan_and_infinities_harm_no_other_memory() {
    with_each_grid(poisoned_gradients);
}

fn poisoned_gradients(devices: &Devices) {
    let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0, f32::from_bits(u32::MAX)];
    for codec in [Codec::Int8, Codec::OneBit, Codec::TopK { fraction: 0.3 }] {
        for stride in [1, 4] {
            let gradient: Vec<f32> = (0..900)
                .map(|i| if i % stride == 0 { values[i % values.len()] } else { 0.5 })
                .collect();
            let mut stretch = DeviceStretch::new(&devices.cuda, codec, gradient.len());
            stretch.encode(&gradient).unwrap();
            stretch.encode(&random(1, gradient.len())).unwrap();
        }
    }
}

#[test]
fn the_first_element_that_is_not_finite_is_found() {
    with_each_grid(first_non_finite);
}

pub(crate) fn first_non_finite(devices: &Devices) {
    for device in devices.both() {
        let find = |values: &[f32]| {
            let mut index = device.buffer::<u64>(1).unwrap();
            device.write(&[77], &mut index).unwrap();
            device.first_non_finite(device.resident(values).unwrap().view(), &mut index).unwrap();
            let mut found = [0];
            device.read(&index, &mut found).unwrap();
            found[0]
        };
        for elements in [0, 1, 255, 1000] {
            let mut values = vec![f32::MAX; elements];
            assert_eq!(find(&values), u64::MAX);
            values.fill(f32::from_bits(1));
            // From the last to the first, so each is before all others.
            for (at, bad) in [(999, f32::NAN), (998, f32::INFINITY), (256, f32::NEG_INFINITY)]
                .into_iter()
                .chain([(254, f32::NAN), (1, -f32::NAN), (0, f32::INFINITY)])
                .filter(|(at, _)| *at < elements)
            {
                values[at] = bad;
                assert_eq!(find(&values), at as u64, "{bad} of {elements}");
            }
        }
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let _turn = DriverTurn::start();
    let devices = Devices::open(None);
    for device in devices.both() {
        let refused = |argument, found, expected| {
            let kernel = if argument == "index" { "first_non_finite" } else { "encode" };
            Err(ComputeError::Length { kernel, argument, found, expected })
        };
        let gradient = device.buffer::<f32>(300).unwrap();
        let mut left = device.buffer::<f32>(300).unwrap();
        let mut out = device.buffer::<u8>(304 + 8).unwrap();
        let short = left.view_mut().slice(1..300);
        assert_eq!(
            device.encode(&Codec::Int8, &gradient, short, &mut out),
            refused("residual", 299, 300)
        );
        let small = out.view_mut().slice(0..304);
        assert_eq!(
            device.encode(&Codec::Int8, &gradient, &mut left, small),
            refused("out", 304, 312)
        );
        assert_eq!(device.encode(&Codec::Int8, &gradient, &mut left, &mut out), Ok(()));
        let threshold = Codec::Threshold { magnitude: 1.0 };
        let refusal = device.encode(&threshold, &gradient, &mut left, &mut out);
        assert!(matches!(refusal, Err(ComputeError::Codec { .. })), "{refusal:?}");
        let mut two = device.buffer::<u64>(2).unwrap();
        assert_eq!(device.first_non_finite(&gradient, &mut two), refused("index", 2, 1));
    }
    let Devices { cpu, cuda, .. } = devices;
    let gradient = cpu.buffer::<f32>(4).unwrap();
    let mut left = cuda.buffer::<f32>(4).unwrap();
    let mut out = cuda.buffer::<u8>(8).unwrap();
    let refusal = cuda.encode(&Codec::F16, &gradient, &mut left, &mut out);
    assert!(matches!(refusal, Err(ComputeError::OtherMemory { .. })), "{refusal:?}");
}
