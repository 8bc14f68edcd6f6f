//! A step of a training on a ring of two, with pauses in place of the backward pass: whole gradients
//! beside streamed ones.
//!
//! Each line has the size of a layer, the pause for each of 8 layers, and the median times of a step.
//! *Pauses* is the time of the backward pass alone, the limit of an overlap.

use std::time::{Duration, Instant};

use pushpull::collective::{Launch, Ring, RingConfig, RingTrainer, RingTrainerConfig};
use pushpull::{Sgd, VariableSpec, blocking};

use crate::Fault;

const LAYERS: usize = 8;

/// The sizes of a layer in KiB, with the pause in microseconds.
const SETTINGS: [(u64, u64); 5] =
    [(64, 500), (1024, 500), (1024, 2000), (4096, 2000), (4096, 5000)];

/// The steps of each kind that a median is of.
const STEPS: usize = 60;

/// The times of the steps of one rank.
struct Times {
    applied: Vec<Duration>,
    streamed: Vec<Duration>,
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}

/// Computes for this long. A device would: the processor is free.
fn pause(time: Duration) {
    std::thread::sleep(time);
}

async fn train(ring: Ring, elements: u64, time: Duration) -> Result<Times, Fault> {
    let names: Vec<String> = (0..LAYERS).map(|layer| format!("w{layer}")).collect();
    let mut variables = Vec::new();
    for name in &names {
        variables.push(VariableSpec::f32(name.clone(), [elements])?);
    }
    let config = RingTrainerConfig::new(Sgd::new(1e-3)).variables(variables).regroup_every(0);
    let mut trainer = RingTrainer::start(ring, config, |_| ()).await?;
    let gradient = vec![1.0_f32; elements as usize];
    let mut times = Times { applied: Vec::new(), streamed: Vec::new() };
    // In turns, so that both meet the same load of the machine.
    for _ in 0..STEPS {
        trainer.ring().barrier().await?;
        let begin = Instant::now();
        let gradients = trainer.parts().1;
        for name in names.iter().rev() {
            pause(time);
            gradients.view_mut_unfilled::<f32>(name)?.copy_from_slice(&gradient);
        }
        trainer.apply().await?;
        times.applied.push(begin.elapsed());

        trainer.ring().barrier().await?;
        let begin = Instant::now();
        let mut step = trainer.begin()?;
        for name in names.iter().rev() {
            pause(time);
            step.variable(name, &gradient).await?;
        }
        step.finish().await?;
        times.streamed.push(begin.elapsed());
    }
    trainer.leave().await;
    Ok(times)
}

/// Prints the median times of a step both ways, for each setting.
pub(crate) fn compare() -> Result<(), Fault> {
    println!("KiB a layer  pause ms  pauses ms  applied ms  streamed ms");
    for (kib, micros) in SETTINGS {
        let time = Duration::from_micros(micros);
        let folder = tempfile::tempdir()?;
        let rank = |index: u32| -> Result<Times, Fault> {
            let launch = Launch::new(index, 2)?.parent_process(std::process::id());
            let config = RingConfig::new(launch).folder(folder.path());
            let ring = blocking::Ring::join(config)?.into_inner();
            let runtime = tokio::runtime::Builder::new_current_thread().build()?;
            runtime.block_on(train(ring, kib * 256, time))
        };
        let times = std::thread::scope(|scope| {
            let other = scope.spawn(|| rank(1).map(|_| ()));
            let times = rank(0);
            other.join().map_err(|_| "rank 1 has panicked")??;
            times
        })?;
        let pauses = LAYERS as f64 * time.as_secs_f64() * 1e3;
        let applied = median(times.applied);
        let streamed = median(times.streamed);
        let pause = time.as_secs_f64() * 1e3;
        println!("{kib:11}  {pause:8.1}  {pauses:9.1}  {applied:10.1}  {streamed:11.1}");
    }
    Ok(())
}
