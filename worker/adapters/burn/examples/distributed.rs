//! A recurrent network on handwritten digits, trained by burn's `Learner` over parameter servers.
//!
//! Start the servers with the rule and the number of steps, then each worker with its index:
//!
//! ```sh
//! pushpull-ps --ps-hosts 127.0.0.1:2222 --optimizer adam --learning-rate 0.01 --last-step 900 &
//! cargo run --release --example distributed "ps=127.0.0.1:2222;worker=a:1,b:1" 0 &
//! cargo run --release --example distributed "ps=127.0.0.1:2222;worker=a:1,b:1" 1
//! ```

mod digits;

use burn::optim::AdamConfig;
use burn::tensor::Device;
use burn::train::metric::LossMetric;
use burn::train::{Learner, SupervisedTraining};
use pushpull_burn::PushPullStrategy;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::default();
    let model = digits::DigitNetwork::new(&device.clone().autodiff());
    let learner = Learner::new(model, AdamConfig::new().init(), 0.01);
    let folder = std::env::temp_dir().join("digits");
    let strategy = PushPullStrategy::new(digits::training()?, device.clone());
    let training = SupervisedTraining::new(folder, digits::loader(false), digits::loader(true))
        .metric_valid_numeric(LossMetric::new())
        .with_training_strategy((&strategy).into())
        .num_epochs(20);
    let result = training.launch(learner);
    println!("accuracy {:.4}", result.model.accuracy(&device));
    strategy.end().ok_or("burn has not begun")??;
    Ok(())
}
