//! The trainer with samples and checkpoints in a bucket, and nothing on the disk of its machine.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::path::Path;
use std::process::Command;

use pushpull::checkpoint::CheckpointStorage;
use pushpull::remote::{RemoteOptions, RemoteStorage};

#[path = "../../../ps/remote/tests/engines/mod.rs"]
mod engines;

use engines::Engine;

/// Returns the files of a data set of 4 x 4 pixels in which the class is the brightest of ten.
fn files() -> Vec<(String, Vec<u8>)> {
    let parts = [("train", 400_u32), ("t10k", 100)];
    parts
        .into_iter()
        .flat_map(|(part, count)| {
            let mut images: Vec<u8> = [0x0803, count, 4, 4]
                .into_iter()
                .flat_map(|word: u32| word.to_be_bytes())
                .collect();
            let mut labels: Vec<u8> =
                [0x0801, count].into_iter().flat_map(|word: u32| word.to_be_bytes()).collect();
            for sample in 0..count {
                let class = sample * 7 % 10;
                let pixel = |at| if at == class { 255 } else { (sample * 31 + at * 17) as u8 % 60 };
                images.extend((0..16).map(pixel));
                labels.push(class as u8);
            }
            let name = |kind: &str| format!("{part}-{kind}");
            [(name("images-idx3-ubyte"), images), (name("labels-idx1-ubyte"), labels)]
        })
        .collect()
}

/// Trains in an empty directory. Returns the result, which is the last line.
fn train(flags: &[&str], settings: &[(&'static str, String)]) -> serde_json::Value {
    let empty = tempfile::tempdir().unwrap();
    let mut digits = Command::new(env!("CARGO_BIN_EXE_digits"));
    digits.args(["--synchronous", "1/1"]).args(flags);
    digits.current_dir(empty.path()).envs(settings.iter().map(|(name, value)| (*name, value)));
    let output = digits.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(empty.path().read_dir().unwrap().count(), 0, "it writes no file");
    let output = String::from_utf8(output.stdout).unwrap();
    serde_json::from_str(output.lines().last().unwrap()).unwrap()
}

#[test]
fn samples_of_a_bucket_train_as_those_of_a_directory() {
    let Some(engine) = Engine::moto() else { return };
    let directory = tempfile::tempdir().unwrap();
    for (name, bytes) in files() {
        engine.put_object(&format!("data/set/{name}"), &bytes);
        std::fs::write(Path::new(directory.path()).join(name), bytes).unwrap();
    }
    let data = format!("{}/data/set", engine.url);
    let remote = train(&["--data", &data, "--steps", "300"], &engine.settings);
    let data = directory.path().to_str().unwrap();
    let local = train(&["--data", data, "--steps", "300"], &[]);
    assert_eq!(remote["accuracy"], local["accuracy"], "{remote} {local}");
    assert!(remote["accuracy"].as_f64().unwrap() > 0.9, "{remote}");
}

#[test]
fn a_training_resumes_from_its_checkpoint_in_a_bucket() {
    let Some(engine) = Engine::moto() else { return };
    let checkpoints = format!("{}/digits/run", engine.url);
    for (from, steps) in [(0, 200), (200, 400)] {
        let to = steps.to_string();
        let flags = ["--checkpoint-dir", &*checkpoints, "--steps", &*to];
        let result = train(&flags, &engine.settings);
        assert_eq!((&result["from_step"], &result["steps"]), (&from.into(), &steps.into()));
    }
}

#[test]
fn a_bucket_without_the_files_is_named() {
    let Some(engine) = Engine::moto() else { return };
    let mut digits = Command::new(env!("CARGO_BIN_EXE_digits"));
    digits.args(["--data", "s3://ckpt/nothing"]);
    digits.envs(engine.settings.iter().map(|(name, value)| (*name, value)));
    let output = digits.output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{errors}");
    let expected = "cannot find train-images-idx3-ubyte or train-images-idx3-ubyte.gz in \
                    s3://ckpt/nothing";
    assert!(errors.contains(expected), "{errors}");
}
