//! Every kernel on a CUDA device, beside the processor: fresh inputs, odd sizes, poisoned outputs.

use half::{bf16, f16};
use pushpull_device::{
    Activation, Bags, Buffer, Combiner, ComputeError, Device, DeviceElement, Half, Matrix,
};

use crate::emulator::{Devices, assert_close, with_each_grid};
use crate::testing::random;

const TOLERANCE: f32 = 1e-5;

type KernelOutputs = Vec<Vec<f32>>;

/// Runs a kernel on both devices and compares what it writes.
#[track_caller]
fn compare(devices: &Devices, run: impl Fn(&Device) -> Result<KernelOutputs, ComputeError>) {
    let expected = run(&devices.cpu).unwrap();
    let found = run(&devices.cuda).unwrap();
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert_close(found, expected, TOLERANCE);
    }
}

/// Copies an output from a device.
fn read<T: DeviceElement>(device: &Device, buffer: &Buffer<T>) -> Result<Vec<T>, ComputeError> {
    let mut values = vec![T::default(); buffer.len()];
    device.read(buffer, &mut values)?;
    Ok(values)
}

/// Allocates an output whose content nothing may depend on.
fn poisoned(device: &Device, length: usize) -> Buffer<f32> {
    let mut buffer = device.buffer(length).unwrap();
    device.write(&vec![f32::NAN; length], &mut buffer).unwrap();
    buffer
}

/// Allocates a buffer with a copy of values.
fn filled(device: &Device, values: &[f32]) -> Buffer<f32> {
    let mut buffer = device.buffer(values.len()).unwrap();
    device.write(values, &mut buffer).unwrap();
    buffer
}

#[test]
fn products_of_any_size_and_layout() {
    with_each_grid(products);
}

pub(crate) fn products(devices: &Devices) {
    // A tile has 64 rows and columns and 16 terms. The first product has more tiles in each
    // dimension than the largest grid that is limited has blocks.
    let mut sizes = vec![(193, 3, 193), (1, 1, 1), (3, 5, 7), (64, 16, 64), (65, 17, 70)];
    sizes.extend([(130, 33, 5), (2, 0, 3), (0, 3, 2)]);
    // Where there is cuBLAS, it computes what is large.
    if devices.cuda.uses_cublas().unwrap() {
        println!("products by cuBLAS");
        sizes.extend([(129, 130, 65), (1, 300, 3501), (1021, 1, 1031), (3503, 302, 1)]);
    }
    for (rows, inner, columns) in sizes {
        let a = random(1, rows * inner);
        let b = random(2, inner * columns);
        for (transposes_a, transposes_b, beta) in
            [(false, false, 0.0), (true, false, 1.0), (false, true, -0.5), (true, true, 0.0)]
        {
            compare(devices, |device| {
                let a = device.resident(&a)?;
                let b = device.resident(&b)?;
                // The transposed of the stored matrix has the wanted shape.
                let a = match transposes_a {
                    false => Matrix::new(a.view(), rows, inner)?,
                    true => Matrix::new(a.view(), inner, rows)?.transposed(),
                };
                let b = match transposes_b {
                    false => Matrix::new(b.view(), inner, columns)?,
                    true => Matrix::new(b.view(), columns, inner)?.transposed(),
                };
                let mut product = match beta == 0.0 {
                    true => poisoned(device, rows * columns),
                    false => filled(device, &random(3, rows * columns)),
                };
                device.multiply(a, b, beta, &mut product)?;
                Ok(vec![read(device, &product)?])
            });
        }
    }
}

#[test]
fn activations_and_their_derivatives() {
    with_each_grid(activations);
}

pub(crate) fn activations(devices: &Devices) {
    use Activation::{Gelu, Identity, Relu, Sigmoid, Tanh};
    for activation in [Identity, Relu, Tanh, Sigmoid, Gelu] {
        // More rows than the bias gradient adds up at once. In the last size, the sums of each
        // chunk of rows are more than 3 blocks of threads.
        for (rows, columns) in [(1, 1), (131, 7), (64, 3), (3, 801)] {
            let mut sums = random(1, rows * columns);
            sums.iter_mut().for_each(|x| *x *= 6.0);
            sums[0] = f32::NAN;
            compare(devices, |device| {
                let bias = filled(device, &random(2, columns));
                let mut sums = filled(device, &sums);
                let mut outputs = poisoned(device, rows * columns);
                device.activate(activation, &bias, &mut sums, &mut outputs)?;
                let mut gradients = filled(device, &random(4, rows * columns));
                let mut by_bias = poisoned(device, columns);
                device.activate_back(activation, &sums, &outputs, &mut gradients, &mut by_bias)?;
                let all = [&sums, &outputs, &gradients, &by_bias];
                all.into_iter().map(|buffer| read(device, buffer)).collect()
            });
        }
    }
}

#[test]
fn losses_and_their_derivatives() {
    with_each_grid(losses);
}

pub(crate) fn losses(devices: &Devices) {
    // Fewer classes than a block has threads, and more.
    for (rows, classes) in [(1, 2), (67, 10), (5, 300)] {
        let labels: Vec<u32> = (0..rows as u32).map(|row| row * 7 % classes as u32).collect();
        let mut logits = random(1, rows * classes);
        logits.iter_mut().for_each(|x| *x *= 20.0);
        compare(devices, |device| {
            let mut logits = filled(device, &logits);
            let loss = device.softmax_cross_entropy(&mut logits, classes, &labels)?;
            Ok(vec![vec![loss as f32], read(device, &logits)?])
        });
    }
    type Loss = fn(&Device, &mut Buffer<f32>, &[f32]) -> Result<f64, ComputeError>;
    let losses: [Loss; 2] = [
        |device, outputs, targets| {
            device.sigmoid_cross_entropy(outputs, device.resident(targets)?.view())
        },
        |device, outputs, targets| {
            device.mean_squared_error(outputs, device.resident(targets)?.view())
        },
    ];
    for count in [1, 1000] {
        for loss in losses {
            compare(devices, |device| {
                let mut outputs = filled(device, &random(3, count));
                let targets: Vec<f32> = random(4, count).iter().map(|x| x.abs()).collect();
                let mean = loss(device, &mut outputs, &targets)?;
                Ok(vec![vec![mean as f32], read(device, &outputs)?])
            });
        }
    }
}

#[test]
fn embedding_bags_and_their_gradients() {
    with_each_grid(embedding_bags);
}

pub(crate) fn embedding_bags(devices: &Devices) {
    // The second width has more columns than 3 blocks of threads.
    for width in [5, 1001] {
        embedding_bags_of(devices, width);
    }
}

fn embedding_bags_of(devices: &Devices, width: usize) {
    let rows = 11;
    // An empty bag, an id twice in one bag, and ids of several bags.
    let ids = [3, 8, 3, 0, 10, 8, 2, 3];
    let ends = [3, 3, 5, 7, 8];
    for combiner in [Combiner::Sum, Combiner::Mean] {
        compare(devices, |device| {
            let bags = Bags::new(&ids, &ends)?;
            let mut table = filled(device, &random(1, rows * width));
            let mut outputs = poisoned(device, ends.len() * width);
            device.embedding_bag(combiner, &table, width, bags, &mut outputs)?;
            let gradients = filled(device, &random(2, ends.len() * width));
            let mut by_id = poisoned(device, ids.len() * width);
            device.embedding_bag_rows(combiner, width, bags, &gradients, &mut by_id)?;
            device.embedding_bag_add(combiner, &mut table, width, bags, &gradients)?;
            [&outputs, &by_id, &table].into_iter().map(|buffer| read(device, buffer)).collect()
        });
    }
}

#[test]
fn elements_and_sums() {
    with_each_grid(elements);
}

pub(crate) fn elements(devices: &Devices) {
    for count in [1, 255, 5001] {
        compare(devices, |device| {
            let x = filled(device, &random(1, count));
            let mut y = filled(device, &random(2, count));
            device.axpy(-0.3, &x, &mut y)?;
            device.add(&x, &mut y)?;
            device.mul(&x, &mut y)?;
            device.scale(3.0, &mut y)?;
            let mut quotients = filled(device, &random(3, count));
            device.div(&x, &mut quotients)?;
            let mut ones = poisoned(device, count);
            device.fill(1.0, &mut ones)?;
            let mut copied = poisoned(device, count);
            device.copy(&y, &mut copied)?;
            let sums = vec![device.sum(&y)? as f32, device.mean(&ones)? as f32];
            Ok(vec![read(device, &copied)?, read(device, &quotients)?, read(device, &ones)?, sums])
        });
    }
    // More than one block adds up, and nothing at all.
    compare(devices, |device| {
        let many = filled(device, &random(5, 3 * (1 << 15) + 77));
        let none = device.buffer::<f32>(0)?;
        Ok(vec![vec![device.sum(&many)? as f32, device.sum(&none)? as f32]])
    });
}

/// All values of the half types, and values of `f32` of all kinds.
#[test]
fn casts_are_those_of_the_processor_bit_by_bit() {
    with_each_grid(|devices| casts(devices, 1));
}

/// Compares the casts of every value, or of one in `each`.
pub(crate) fn casts(devices: &Devices, each: usize) {
    casts_of(devices, each, f16::from_bits, f16::to_bits);
    casts_of(devices, each, bf16::from_bits, bf16::to_bits);
}

fn casts_of<H: Half + Into<f32>>(
    devices: &Devices,
    each: usize,
    of: impl Fn(u16) -> H,
    to: impl Fn(H) -> u16,
) {
    let all: Vec<H> = (0..=u16::MAX).step_by(each).map(of).collect();
    let values = (0..1 << 16).step_by(each);
    let mut values: Vec<f32> = values.map(|n: u32| f32::from_bits(n * 65_537)).collect();
    // Halfway between two halves, and just beside.
    values.extend(all.iter().flat_map(|&half| {
        let value = half.into().to_bits();
        [value.wrapping_add(0x1000), value.wrapping_add(0x8000), value.wrapping_add(0x0fff)]
            .map(f32::from_bits)
    }));
    let [expected, found] = devices.both().map(|device| {
        let mut widened = device.buffer(all.len()).unwrap();
        device.widen::<H>(device.resident(&all).unwrap().view(), &mut widened).unwrap();
        let mut rounded = device.buffer::<H>(values.len()).unwrap();
        device.round(device.resident(&values).unwrap().view(), &mut rounded).unwrap();
        let widened = read(device, &widened).unwrap();
        let rounded = read(device, &rounded).unwrap();
        let widened: Vec<u32> = widened.into_iter().map(f32::to_bits).collect();
        (widened, rounded.into_iter().map(&to).collect::<Vec<u16>>())
    });
    for (half, (found, expected)) in all.iter().zip(found.0.iter().zip(&expected.0)) {
        assert_eq!(found, expected, "half {:#06x}", to(*half));
    }
    for (value, (found, expected)) in values.iter().zip(found.1.iter().zip(&expected.1)) {
        assert_eq!(found, expected, "{value} ({:#010x})", value.to_bits());
    }
}
