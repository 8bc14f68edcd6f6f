//! Networks on a CUDA device, beside the processor.

use pushpull_cuda_emulator::turn::DriverTurn;
use pushpull_device::{
    Bags, Device, EmbeddingBag, LabelledBags, Logistic, Mlp, Network, Resident, Samples, Targets,
    View, ViewMut,
};

use crate::emulator::{Devices, assert_close, with_each_grid};
use crate::testing::random;

/// Computes the loss and the gradients of a network with random parameters.
fn compute<B, N: Network<B>>(mut network: N, batch: B) -> Vec<Vec<f32>> {
    let device = network.device().clone();
    let elements = |shape: &Vec<u64>| shape.iter().product::<u64>() as usize;
    let counts: Vec<usize> = network.shapes().iter().map(elements).collect();
    let params: Vec<Vec<f32>> = counts.iter().zip(1..).map(|(&n, seed)| random(seed, n)).collect();
    let residents: Vec<Resident<'_, f32>> =
        params.iter().map(|param| device.resident(param).unwrap()).collect();
    let views: Vec<View<'_, f32>> = residents.iter().map(Resident::view).collect();
    let mut out: Vec<_> =
        counts.iter().map(|&count| device.buffer::<f32>(count).unwrap()).collect();
    for buffer in &mut out {
        device.fill(f32::NAN, buffer).unwrap();
    }
    let gradients = out.iter_mut().map(ViewMut::from).collect();
    let loss = network.gradients(&views, batch, gradients).unwrap();
    let mut all = vec![vec![loss as f32]];
    for buffer in &out {
        let mut values = vec![0.0; buffer.len()];
        device.read(buffer, &mut values).unwrap();
        all.push(values);
    }
    all
}

#[track_caller]
fn compare(devices: &Devices, run: impl Fn(Device) -> Vec<Vec<f32>>) {
    let [expected, found] = devices.both().map(|device| run(device.clone()));
    for (found, expected) in found.iter().zip(&expected) {
        assert_close(found, expected, 1e-5);
    }
}

#[test]
fn networks_have_the_gradients_of_the_processor() {
    with_each_grid(networks);
}

fn networks(devices: &Devices) {
    let rows = 37;
    let labels: Vec<u32> = (0..rows as u32).map(|row| row % 4).collect();
    let features = random(9, rows * 13);
    compare(devices, |device| {
        let batch = Samples { features: &features, labels: &labels };
        compute(Mlp::new(device, &[13, 21, 4]), batch)
    });
    let targets: Vec<f32> = labels.iter().map(|&label| (label > 1).into()).collect();
    compare(devices, |device| {
        let batch = Targets { features: &features, targets: &targets };
        compute(Logistic::new(device, 13), batch)
    });
    let ids: Vec<u64> = (0..3 * rows as u64).map(|n| n * n % 10).collect();
    let ends: Vec<usize> = (1..=rows).map(|bag| 3 * bag).collect();
    compare(devices, |device| {
        let batch = LabelledBags { bags: Bags::new(&ids, &ends).unwrap(), labels: &labels };
        compute(EmbeddingBag::new(device, 10, 6, 4), batch)
    });
}

/// A network on a device learns what it learns on the processor.
#[test]
fn a_network_learns_on_the_device() {
    let _turn = DriverTurn::start();
    let losses = Devices::open(None).both().map(|device| {
        let mut network = Mlp::new(device.clone(), &[2, 16, 2]);
        let counts = [32, 16, 32, 2];
        let mut params: Vec<_> = counts
            .iter()
            .zip(1..)
            .map(|(&count, seed)| {
                let mut buffer = device.buffer::<f32>(count).unwrap();
                device.write(&random(seed, count), &mut buffer).unwrap();
                buffer
            })
            .collect();
        let mut gradients = counts.map(|count| device.buffer::<f32>(count).unwrap());
        let features = random(7, 64 * 2);
        let labels: Vec<u32> = features.chunks(2).map(|x| (x[0] * x[1] > 0.0).into()).collect();
        let batch = Samples { features: &features, labels: &labels };
        let mut losses = Vec::new();
        for _ in 0..60 {
            let views: Vec<View<'_, f32>> = params.iter().map(View::from).collect();
            let out = gradients.iter_mut().map(ViewMut::from).collect();
            losses.push(network.gradients(&views, batch, out).unwrap() as f32);
            for (param, gradient) in params.iter_mut().zip(&gradients) {
                device.axpy(-1.0, gradient, param).unwrap();
            }
        }
        losses
    });
    assert_close(&losses[1], &losses[0], 1e-3);
    assert!(losses[1][59] < 0.5 * losses[1][0], "{:?}", losses[1]);
}
