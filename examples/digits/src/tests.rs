//! Trains the network on the digits without servers.

use pushpull::compute::{Device, Mlp, Network, View, ViewMut};
use pushpull::variable::{Initializer, Shape};

use super::data::{CLASSES, Dataset, Split};
use super::train::NAMES;

#[test]
fn gradient_descent_learns_the_digits() {
    let split = Split::digits().unwrap();
    let mut model = Mlp::new(Device::cpu().unwrap(), &[split.width(), 64, CLASSES]);
    let shapes = model.shapes();
    let elements = |shape: &Vec<u64>| shape.iter().product::<u64>() as usize;
    let mut params: Vec<Vec<f32>> = shapes.iter().map(|shape| vec![0.0; elements(shape)]).collect();
    for tensor in [0, 2] {
        let shape = Shape::new(shapes[tensor].clone()).unwrap();
        let values = &mut params[tensor];
        Initializer::GlorotUniform.fill(1, NAMES[tensor], &shape, 0, values);
    }
    let mut gradients = params.clone();
    let pipeline = split.train.shuffle(1).batch(32).repeat();
    let mut loss = f64::NAN;
    for batch in pipeline.shard(0, 1).unwrap().take(600) {
        let batch = Dataset::of(&batch.unwrap().samples);
        let values: Vec<View<'_, f32>> = params.iter().map(View::from).collect();
        let out = gradients.iter_mut().map(ViewMut::from).collect();
        loss = model.gradients(&values, batch.samples(), out).unwrap();
        for (param, gradient) in params.iter_mut().flatten().zip(gradients.iter().flatten()) {
            *param -= 0.3 * gradient;
        }
    }
    let values: Vec<View<'_, f32>> = params.iter().map(View::from).collect();
    let accuracy = model.accuracy(&values, split.test.samples()).unwrap();
    assert!(accuracy >= 0.95, "accuracy {accuracy}, last loss {loss}");
}
