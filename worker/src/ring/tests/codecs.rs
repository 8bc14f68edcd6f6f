//! Trains on rings whose gradients travel encoded.

use pushpull_common::codec::Codec;

use super::*;
use crate::error::ConfigError;

const CODECS: [Codec; 5] =
    [Codec::F16, Codec::Bf16, Codec::Int8, Codec::OneBit, Codec::TopK { fraction: 0.05 }];

/// A training of one vector.
fn vector(elements: u64, rate: f64, codec: Codec) -> RingTrainerConfig {
    let w = VariableSpec::f32("w", [elements]).unwrap();
    RingTrainerConfig::new(Sgd::new(rate)).variables([w]).codec("w", codec)
}

/// The residual of the only variable, from its saved form.
fn residual(trainer: &RingTrainer) -> Vec<f32> {
    let saved = trainer.residuals().unwrap();
    let (head, elements) = saved.split_at(64);
    let count = u64::from_le_bytes(*head.last_chunk().unwrap()) as usize;
    pushpull_common::tensor::elements_of(&elements[..4 * count])
}

#[test]
fn all_ranks_have_the_same_values_in_every_codec() {
    for codec in CODECS {
        for size in [1, 2, 3] {
            let values = run(size, |ring| {
                block_on(async {
                    let rank = ring.rank();
                    let config = RingTrainerConfig::new(Adam::new(0.1)).variables(variables());
                    let config = config.codec("*", codec).codec("b", None);
                    let mut trainer = RingTrainer::start(ring, config, |_| ()).await.unwrap();
                    for step in 1..=5 {
                        let (params, gradients) = trainer.parts();
                        fill(params, gradients, rank);
                        assert_eq!(trainer.apply().await.unwrap(), step);
                    }
                    bytes(&trainer.leave().await)
                })
            });
            assert!(values.iter().all(|rank| *rank == values[0]), "{codec}, {size} ranks");
        }
    }
}

/// What was applied and what is left add up to all gradients.
#[test]
fn no_gradient_is_lost() {
    const STEPS: usize = 20;
    const ELEMENTS: usize = 700;
    let gradient = |rank: u32, step: usize, at: usize| {
        ((at * 7919 + step * 104_729 + rank as usize * 31) % 2001) as f32 / 64.0 - 15.0
    };
    for codec in CODECS {
        for size in [1, 2, 4] {
            let ranks = run(size, |ring| {
                block_on(async {
                    let rank = ring.rank();
                    let config = vector(ELEMENTS as u64, 1.0, codec);
                    let mut trainer = RingTrainer::start(ring, config, |_| ()).await.unwrap();
                    for step in 0..STEPS {
                        let w = trainer.parts().1.view_mut::<f32>("w").unwrap();
                        (0..).zip(w).for_each(|(at, g)| *g = gradient(rank, step, at));
                        trainer.apply().await.unwrap();
                    }
                    let left = residual(&trainer);
                    (trainer.leave().await.view::<f32>("w").unwrap().to_vec(), left)
                })
            });
            for at in 0..ELEMENTS {
                let steps = 0..STEPS;
                let all = steps.flat_map(|step| (0..size).map(move |rank| (rank, step)));
                let given: f32 = all.map(|(rank, step)| gradient(rank, step, at)).sum();
                let applied = -ranks[0].0[at] * size as f32;
                let left: f32 = ranks.iter().map(|(_, left)| left[at]).sum();
                let off = (given - applied - left).abs();
                assert!(off < 0.05, "{codec}, {size} ranks: element {at} is off by {off}");
            }
        }
    }
}

/// Each rank has another optimum. Only their mean is that of the training.
#[test]
fn the_strongest_codecs_reach_the_optimum_of_all_ranks() {
    for codec in [Codec::OneBit, Codec::TopK { fraction: 0.01 }] {
        let values = run(4, |ring| {
            block_on(async {
                let offset = [-1.5, -0.5, 0.5, 1.5][ring.rank() as usize];
                let mut trainer =
                    RingTrainer::start(ring, vector(500, 0.005, codec), |_| ()).await.unwrap();
                for _ in 0..4000 {
                    let (params, gradients) = trainer.parts();
                    let w = params.view::<f32>("w").unwrap();
                    let g = gradients.view_mut::<f32>("w").unwrap();
                    for (at, (g, w)) in g.iter_mut().zip(w).enumerate() {
                        let sign = if at % 3 == 0 { -1.0 } else { 1.0 };
                        *g = w - (at as f32 / 100.0 + sign * offset);
                    }
                    trainer.apply().await.unwrap();
                }
                trainer.leave().await.view::<f32>("w").unwrap().to_vec()
            })
        });
        let off = |(at, w): (usize, &f32)| (w - at as f32 / 100.0).abs();
        let worst = values[0].iter().enumerate().map(off).fold(0.0, f32::max);
        assert!(worst < 0.5, "{codec}: off by {worst}");
        let mean = values[0].iter().enumerate().map(off).sum::<f32>() / 500.0;
        assert!(mean < 0.1, "{codec}: off by {mean} on average");
    }
}

#[test]
fn every_rank_refuses_what_one_rank_cannot_encode() {
    for codec in CODECS {
        run(3, |ring| {
            block_on(async {
                let rank = ring.rank();
                let config = RingTrainerConfig::new(Sgd::new(0.5)).variables(variables());
                let config = config.codec("*", codec);
                let mut trainer = RingTrainer::start(ring, config, |_| ()).await.unwrap();
                let before = bytes(trainer.parts().0);
                let (params, gradients) = trainer.parts();
                fill(params, gradients, rank);
                gradients.view_mut::<f32>("w").unwrap()[33] =
                    if rank == 1 { f32::NAN } else { 1.0 };
                let error = trainer.apply().await.unwrap_err();
                assert!(
                    matches!(&error, Error::NonFinite { variable, element: 33, value }
                        if variable == "w" && value.is_nan()),
                    "{codec}, rank {rank}: {error}"
                );
                assert_eq!((bytes(trainer.parts().0), trainer.global_step()), (before, 0));
                let (params, gradients) = trainer.parts();
                fill(params, gradients, rank);
                assert_eq!(trainer.apply().await.unwrap(), 1);
                trainer.leave().await;
            });
        });
    }
}

#[test]
fn ranks_that_are_left_keep_their_residuals() {
    let values = run(3, |ring| {
        block_on(async {
            let index = ring.index();
            let config = vector(300, 0.5, Codec::TopK { fraction: 0.05 });
            let mut trainer = RingTrainer::start(ring, config, |_| ()).await.unwrap();
            while trainer.global_step() < 20 {
                trainer.parts().1.view_mut::<f32>("w").unwrap().fill(1.0 + index as f32);
                if index == 1 && trainer.global_step() == 7 {
                    return None;
                }
                match trainer.apply().await {
                    Ok(_) => {}
                    Err(Error::Ring(error)) if error.may_shrink() => {
                        let before = residual(&trainer);
                        assert!(before.iter().any(|left| *left != 0.0));
                        trainer.recover().await.unwrap();
                        assert_eq!(residual(&trainer), before);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            Some(bytes(&trainer.leave().await))
        })
    });
    assert!(values[1].is_none() && values[0].is_some() && values[0] == values[2]);
}

#[test]
fn residuals_are_saved_and_restored_or_refused() {
    run(1, |ring| {
        block_on(async {
            let config = vector(300, 0.5, Codec::OneBit);
            let mut trainer = RingTrainer::start(ring, config, |_| ()).await.unwrap();
            let first = trainer.residuals().unwrap();
            trainer.parts().1.view_mut::<f32>("w").unwrap()[7] = 3.0;
            trainer.apply().await.unwrap();
            let later = trainer.residuals().unwrap();
            assert_ne!(first, later);
            trainer.restore_residuals(&first).unwrap();
            assert_eq!(trainer.residuals().unwrap(), first);
            trainer.restore_residuals(&later).unwrap();
            let error = trainer.restore_residuals(&first[1..]).unwrap_err();
            assert!(matches!(error, Error::DamagedResiduals), "{error}");
            assert_eq!(trainer.residuals().unwrap(), later);
        });
    });
}

#[test]
fn a_codec_that_does_not_suit_is_a_fault_of_the_configuration() {
    let start = |config: fn(RingTrainerConfig) -> RingTrainerConfig| {
        let errors = run(1, |ring| {
            let config = config(RingTrainerConfig::new(Sgd::new(0.5)).variables(variables()));
            block_on(RingTrainer::start(ring, config, |_| ())).unwrap_err()
        });
        match errors.into_iter().next() {
            Some(Error::Config(error)) => error,
            other => panic!("{other:?}"),
        }
    };
    let threshold = start(|config| config.codec("*", Codec::Threshold { magnitude: 0.5 }));
    assert!(matches!(threshold, ConfigError::NoRingCodec { .. }), "{threshold}");
    let invalid = start(|config| config.codec("w", Codec::TopK { fraction: 0.0 }));
    assert!(matches!(invalid, ConfigError::Codec { .. }), "{invalid}");
    let nobody = start(|config| config.codec("weights", Codec::F16));
    assert!(matches!(nobody, ConfigError::NothingToCompress { .. }), "{nobody}");
    let plain = start(|config| config.codec("count", Codec::F16));
    assert!(matches!(plain, ConfigError::NotCompressible { .. }), "{plain}");
}

#[test]
fn ranks_with_other_codecs_are_named_with_both() {
    let errors = run(2, |ring| {
        block_on(async {
            let codec = CODECS[ring.rank() as usize];
            RingTrainer::start(ring, vector(9, 0.5, codec), |_| ()).await.unwrap_err()
        })
    });
    for error in errors {
        assert!(matches!(error, Error::Ring(RingError::Difference { .. })), "{error}");
        let text = pushpull_common::error::Chain(&error).to_string();
        assert!(text.contains("w as f16") && text.contains("w as bf16"), "{text}");
    }
}
