//! The rules of coordinators, by table.

use pushpull_common::protocol::EffectId;

use super::*;

const EPOCH: CoordinatorEpoch = CoordinatorEpoch(10);

fn effect_of(
    coordinator: CoordinatorId,
    epoch: CoordinatorEpoch,
    number: u64,
    settled: u64,
) -> EffectRef {
    let id = EffectId { coordinator, epoch, number: EffectNumber(number) };
    EffectRef { id, settled: EffectNumber(settled), digest: number.wrapping_add(100) }
}

fn effect(number: u64, settled: u64) -> EffectRef {
    effect_of(CoordinatorId(EPOCH.0), EPOCH, number, settled)
}

fn opened() -> Coordinators {
    let mut coordinators = Coordinators::new(PlantedBugs::default());
    coordinators.open("trainer", EPOCH).unwrap();
    coordinators
}

fn epoch_refusal(coordinator: u64, epoch: u64, current: u64) -> Refusal {
    let coordinator = CoordinatorId(coordinator);
    let epoch = CoordinatorEpoch(epoch);
    Refusal::CoordinatorEpoch { coordinator, epoch, current: CoordinatorEpoch(current) }
}

#[test]
fn an_effect_counts_once() {
    let mut coordinators = opened();
    assert_eq!(coordinators.check(&effect(3, 0)), Ok(EffectVerdict::Counts));
    coordinators.settle(&effect(3, 0));
    assert_eq!(coordinators.check(&effect(3, 0)), Ok(EffectVerdict::Repeated));
    for (number, settled, expected) in [
        (1, 0, EffectVerdict::Counts),
        (2, 1, EffectVerdict::Counts),
        (3, 2, EffectVerdict::Repeated),
        (64, 0, EffectVerdict::Counts),
        (65, 1, EffectVerdict::Counts),
    ] {
        assert_eq!(
            coordinators.check(&effect(number, settled)),
            Ok(expected),
            "{number}, {settled}"
        );
    }
    coordinators.settle(&effect(5, 3));
    assert_eq!(
        coordinators.check(&effect(1, 0)),
        Ok(EffectVerdict::Repeated),
        "settled by the coordinator"
    );
    assert_eq!(coordinators.check(&effect(4, 0)), Ok(EffectVerdict::Counts));
    coordinators.settle(&effect(4, 0));
    let expected = CoordinatorIs {
        coordinator: CoordinatorId(10),
        epoch: EPOCH,
        settled: EffectNumber(5),
        window: 0,
        first_digest: 0,
        digest_of: EffectNumber(5),
        digest: 105,
    };
    assert_eq!(coordinators.query("trainer"), Ok(expected));
}

#[test]
fn a_digest_is_that_of_an_effect_up_to_the_watermark() {
    let mut coordinators = opened();
    let settled = |coordinators: &mut Coordinators, number, digest| {
        coordinators.settle(&EffectRef { digest, ..effect(number, 0) });
        let CoordinatorIs { settled, first_digest, digest_of, digest, .. } =
            coordinators.query("trainer").unwrap();
        (settled.0, first_digest, digest_of.0, digest)
    };
    assert_eq!(settled(&mut coordinators, 2, 102), (0, 0, 0, 0), "effect 1 may still be another");
    assert_eq!(settled(&mut coordinators, 4, 104), (0, 0, 0, 0));
    assert_eq!(settled(&mut coordinators, 1, 101), (2, 101, 1, 101));
    assert_eq!(
        settled(&mut coordinators, 3, 103),
        (4, 101, 4, 104),
        "that of effect 4 has arrived before"
    );
    // A coordinator that has left calls out does not know the digest.
    assert_eq!(settled(&mut coordinators, 5, 0), (5, 101, 0, 0));
    assert_eq!(settled(&mut coordinators, 6, 206), (6, 101, 6, 206));
    // The effects of another coordinator begin again.
    coordinators.close("trainer", EPOCH).unwrap();
    let opened = coordinators.open("trainer", CoordinatorEpoch(20)).unwrap();
    assert_eq!((opened.first_digest, opened.digest_of, opened.digest), (0, EffectNumber(0), 0));
}

#[test]
fn an_effect_outside_the_window_is_refused() {
    let mut coordinators = opened();
    coordinators.settle(&effect(1, 0));
    for (number, settled, at, newest) in [
        (0, 0, 0, 65),
        (66, 0, 1, 65),
        (u64::MAX, 0, 1, 65),
        (7, 7, 7, 65),
        (7, u64::MAX, u64::MAX, 65),
        (100, 30, 30, 94),
        (u64::MAX, u64::MAX - 1, 1, 65),
    ] {
        let number = EffectNumber(number);
        let settled = EffectNumber(settled);
        let expected = Refusal::EffectWindow {
            number,
            settled: EffectNumber(at),
            newest: EffectNumber(newest),
        };
        assert_eq!(
            coordinators.check(&effect(number.0, settled.0)),
            Err(expected),
            "{number}, {settled}"
        );
    }
}

#[test]
fn a_higher_epoch_resumes_the_coordinator_and_fences_older_ones() {
    let mut coordinators = opened();
    coordinators.settle(&effect(2, 0));
    let resumed = coordinators.open("trainer", CoordinatorEpoch(14)).unwrap();
    assert_eq!((resumed.coordinator, resumed.epoch), (CoordinatorId(10), CoordinatorEpoch(14)));
    assert_eq!((resumed.settled, resumed.window), (EffectNumber(0), 0b10));
    assert_eq!(coordinators.check(&effect(1, 0)), Err(epoch_refusal(10, 10, 14)));
    let newer = |number| effect_of(CoordinatorId(10), CoordinatorEpoch(14), number, 0);
    assert_eq!(coordinators.check(&newer(1)), Ok(EffectVerdict::Counts));
    assert_eq!(coordinators.check(&newer(2)), Ok(EffectVerdict::Repeated));
    let ahead = effect_of(CoordinatorId(10), CoordinatorEpoch(15), 1, 0);
    assert_eq!(coordinators.check(&ahead), Err(epoch_refusal(10, 15, 14)), "not opened here");
    let unknown = effect_of(CoordinatorId(11), CoordinatorEpoch(14), 1, 0);
    assert_eq!(
        coordinators.check(&unknown),
        Err(Refusal::UnknownCoordinator { coordinator: CoordinatorId(11) })
    );
    // The update was under way when the coordinator resumed.
    coordinators.settle(&effect(1, 0));
    assert_eq!(coordinators.query("trainer").unwrap().settled, EffectNumber(2));
}

#[test]
fn another_shard_takes_what_the_step_owner_has_assigned() {
    let mut coordinators = Coordinators::new(PlantedBugs::default());
    let open = |coordinators: &mut Coordinators, coordinator, epoch| {
        coordinators.open_as("trainer", CoordinatorId(coordinator), CoordinatorEpoch(epoch))
    };
    assert_eq!(open(&mut coordinators, 0, 0), Err(epoch_refusal(0, 0, 0)));
    assert_eq!(open(&mut coordinators, 12, 11), Err(epoch_refusal(12, 11, 0)), "assigned later");
    assert!(open(&mut coordinators, 10, 12).is_ok());
    coordinators.settle(&effect_of(CoordinatorId(10), CoordinatorEpoch(12), 1, 0));
    assert_eq!(open(&mut coordinators, 10, 11), Err(epoch_refusal(10, 11, 12)));
    assert_eq!(
        open(&mut coordinators, 11, 12),
        Err(epoch_refusal(11, 12, 12)),
        "another coordinator"
    );
    assert_eq!(open(&mut coordinators, 10, 12).unwrap().settled, EffectNumber(1), "repeated");
    assert_eq!(open(&mut coordinators, 10, 13).unwrap().settled, EffectNumber(1), "resumed");
    let stolen = coordinators.open_as("another", CoordinatorId(10), CoordinatorEpoch(20));
    assert_eq!(stolen, Err(epoch_refusal(10, 20, 13)));
    // The step owner has closed the coordinator, and this shard was not told.
    let renewed = open(&mut coordinators, 14, 14).unwrap();
    assert_eq!((renewed.coordinator, renewed.settled), (CoordinatorId(14), EffectNumber(0)));
}

#[test]
fn a_closed_source_is_forgotten_and_not_opened_by_a_late_request() {
    let mut coordinators = opened();
    let coordinator = CoordinatorId(10);
    let trainer = "trainer";
    assert_eq!(coordinators.close(trainer, CoordinatorEpoch(9)), Err(epoch_refusal(10, 9, 10)));
    assert_eq!(coordinators.close(trainer, CoordinatorEpoch(11)), Err(epoch_refusal(10, 11, 10)));
    assert_eq!(coordinators.close(trainer, EPOCH), Ok(()));
    assert_eq!(coordinators.close(trainer, EPOCH), Ok(()), "repeated");
    assert_eq!(coordinators.check(&effect(1, 0)), Err(Refusal::UnknownCoordinator { coordinator }));
    let coordinator = CoordinatorId(0);
    assert_eq!(coordinators.query(trainer), Err(Refusal::UnknownCoordinator { coordinator }));
    let late = coordinators.open_as(trainer, CoordinatorId(10), EPOCH);
    assert_eq!(late, Err(epoch_refusal(10, 10, 10)));
    coordinators.settle(&effect(1, 0));
    let renewed = coordinators.open(trainer, CoordinatorEpoch(11)).unwrap();
    assert_eq!((renewed.coordinator, renewed.settled), (CoordinatorId(11), EffectNumber(0)));
}

#[test]
fn a_shard_remembers_a_limited_number_of_coordinators_and_forgets_none_by_itself() {
    let mut coordinators = Coordinators::new(PlantedBugs::default());
    let epoch = |index: usize| CoordinatorEpoch(1 + index as u64);
    for index in 0..COORDINATORS_MAX {
        assert!(coordinators.open(&format!("trainer {index}"), epoch(index)).is_ok());
    }
    let refused = coordinators.open("one more", epoch(COORDINATORS_MAX)).unwrap_err();
    assert!(matches!(refused, Refusal::Busy { limit: 64, .. }), "{refused:?}");
    let resumed = coordinators.open("trainer 5", epoch(COORDINATORS_MAX));
    assert_eq!(resumed.unwrap().coordinator, CoordinatorId(6));
    coordinators.close("trainer 7", epoch(7)).unwrap();
    assert!(coordinators.open("one more", epoch(COORDINATORS_MAX + 1)).is_ok());
}

#[test]
fn a_restore_goes_back_to_the_effects_of_the_checkpoint() {
    let mut coordinators = opened();
    coordinators.settle(&effect(1, 0));
    let saved: Vec<CoordinatorEntry> =
        coordinators.entries().map(|(_, entry)| entry.clone()).collect();
    coordinators.settle(&effect(2, 1));
    coordinators.open("trainer", CoordinatorEpoch(12)).unwrap();
    coordinators.open("evaluator", CoordinatorEpoch(13)).unwrap();
    coordinators.roll_back(saved);
    let restored = coordinators.query("trainer").unwrap();
    assert_eq!((restored.coordinator, restored.settled), (CoordinatorId(10), EffectNumber(1)));
    assert_eq!(restored.epoch, CoordinatorEpoch(14), "above every epoch from before");
    assert!(coordinators.query("evaluator").is_err());
    assert_eq!(coordinators.newest_epoch(), CoordinatorEpoch(14));
    coordinators.clear();
    assert!(coordinators.query("trainer").is_err());
}
