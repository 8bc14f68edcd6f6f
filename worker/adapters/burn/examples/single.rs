//! A recurrent network on handwritten digits, trained by burn's `Learner` in one process.
//!
//! `cargo run --release --example single`

mod digits;

use burn::optim::AdamConfig;
use burn::tensor::Device;
use burn::train::metric::LossMetric;
use burn::train::{Learner, SupervisedTraining};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::default();
    let model = digits::DigitNetwork::new(&device.clone().autodiff());
    let learner = Learner::new(model, AdamConfig::new().init(), 0.01);
    let folder = std::env::temp_dir().join("digits");
    let training = SupervisedTraining::new(folder, digits::loader(false), digits::loader(true))
        .metric_valid_numeric(LossMetric::new())
        .num_epochs(20);
    let result = training.launch(learner);
    println!("accuracy {:.4}", result.model.accuracy(&device));
    Ok(())
}
