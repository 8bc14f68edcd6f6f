//! The rules of call sources, by table.

use pushpull_common::protocol::CallId;

use super::*;

const EPOCH: CallEpoch = CallEpoch(10);

fn call_of(source: CallSource, epoch: CallEpoch, number: u64, settled: u64) -> CallRef {
    let id = CallId { source, epoch, number: CallNumber(number) };
    CallRef { id, settled: CallNumber(settled), digest: number.wrapping_add(100) }
}

fn call(number: u64, settled: u64) -> CallRef {
    call_of(CallSource(EPOCH.0), EPOCH, number, settled)
}

fn opened() -> CallSources {
    let mut calls = CallSources::new(PlantedBugs::default());
    calls.open("trainer", EPOCH).unwrap();
    calls
}

fn epoch_refusal(source: u64, epoch: u64, current: u64) -> Refusal {
    let source = CallSource(source);
    let epoch = CallEpoch(epoch);
    Refusal::CallEpoch { source, epoch, current: CallEpoch(current) }
}

#[test]
fn a_call_counts_once() {
    let mut calls = opened();
    assert_eq!(calls.check(&call(3, 0)), Ok(CallVerdict::Counts));
    calls.settle(&call(3, 0));
    assert_eq!(calls.check(&call(3, 0)), Ok(CallVerdict::Repeated));
    for (number, settled, expected) in [
        (1, 0, CallVerdict::Counts),
        (2, 1, CallVerdict::Counts),
        (3, 2, CallVerdict::Repeated),
        (64, 0, CallVerdict::Counts),
        (65, 1, CallVerdict::Counts),
    ] {
        assert_eq!(calls.check(&call(number, settled)), Ok(expected), "{number}, {settled}");
    }
    calls.settle(&call(5, 3));
    assert_eq!(calls.check(&call(1, 0)), Ok(CallVerdict::Repeated), "settled by the coordinator");
    assert_eq!(calls.check(&call(4, 0)), Ok(CallVerdict::Counts));
    calls.settle(&call(4, 0));
    let expected = CallsAre {
        source: CallSource(10),
        epoch: EPOCH,
        settled: CallNumber(5),
        window: 0,
        first_digest: 0,
        digest_of: CallNumber(5),
        digest: 105,
    };
    assert_eq!(calls.query("trainer"), Ok(expected));
}

#[test]
fn a_digest_is_that_of_a_call_up_to_the_watermark() {
    let mut calls = opened();
    let settled = |calls: &mut CallSources, number, digest| {
        calls.settle(&CallRef { digest, ..call(number, 0) });
        let CallsAre { settled, first_digest, digest_of, digest, .. } =
            calls.query("trainer").unwrap();
        (settled.0, first_digest, digest_of.0, digest)
    };
    assert_eq!(settled(&mut calls, 2, 102), (0, 0, 0, 0), "call 1 may still be another");
    assert_eq!(settled(&mut calls, 4, 104), (0, 0, 0, 0));
    assert_eq!(settled(&mut calls, 1, 101), (2, 101, 1, 101));
    assert_eq!(settled(&mut calls, 3, 103), (4, 101, 4, 104), "that of call 4 has arrived before");
    // A coordinator that has left calls out does not know the digest.
    assert_eq!(settled(&mut calls, 5, 0), (5, 101, 0, 0));
    assert_eq!(settled(&mut calls, 6, 206), (6, 101, 6, 206));
    // The calls of another source begin again.
    calls.close("trainer", EPOCH).unwrap();
    let opened = calls.open("trainer", CallEpoch(20)).unwrap();
    assert_eq!((opened.first_digest, opened.digest_of, opened.digest), (0, CallNumber(0), 0));
}

#[test]
fn a_call_outside_the_window_is_refused() {
    let mut calls = opened();
    calls.settle(&call(1, 0));
    for (number, settled, at, newest) in [
        (0, 0, 0, 65),
        (66, 0, 1, 65),
        (u64::MAX, 0, 1, 65),
        (7, 7, 7, 65),
        (7, u64::MAX, u64::MAX, 65),
        (100, 30, 30, 94),
        (u64::MAX, u64::MAX - 1, 1, 65),
    ] {
        let number = CallNumber(number);
        let settled = CallNumber(settled);
        let expected =
            Refusal::CallWindow { number, settled: CallNumber(at), newest: CallNumber(newest) };
        assert_eq!(calls.check(&call(number.0, settled.0)), Err(expected), "{number}, {settled}");
    }
}

#[test]
fn a_higher_epoch_resumes_the_calls_and_fences_older_ones() {
    let mut calls = opened();
    calls.settle(&call(2, 0));
    let resumed = calls.open("trainer", CallEpoch(14)).unwrap();
    assert_eq!((resumed.source, resumed.epoch), (CallSource(10), CallEpoch(14)));
    assert_eq!((resumed.settled, resumed.window), (CallNumber(0), 0b10));
    assert_eq!(calls.check(&call(1, 0)), Err(epoch_refusal(10, 10, 14)));
    let newer = |number| call_of(CallSource(10), CallEpoch(14), number, 0);
    assert_eq!(calls.check(&newer(1)), Ok(CallVerdict::Counts));
    assert_eq!(calls.check(&newer(2)), Ok(CallVerdict::Repeated));
    let ahead = call_of(CallSource(10), CallEpoch(15), 1, 0);
    assert_eq!(calls.check(&ahead), Err(epoch_refusal(10, 15, 14)), "not opened here");
    let unknown = call_of(CallSource(11), CallEpoch(14), 1, 0);
    assert_eq!(calls.check(&unknown), Err(Refusal::UnknownCalls { source: CallSource(11) }));
    // The update was under way when the coordinator resumed.
    calls.settle(&call(1, 0));
    assert_eq!(calls.query("trainer").unwrap().settled, CallNumber(2));
}

#[test]
fn another_shard_takes_what_the_step_owner_has_assigned() {
    let mut calls = CallSources::new(PlantedBugs::default());
    let open = |calls: &mut CallSources, source, epoch| {
        calls.open_as("trainer", CallSource(source), CallEpoch(epoch))
    };
    assert_eq!(open(&mut calls, 0, 0), Err(epoch_refusal(0, 0, 0)));
    assert_eq!(open(&mut calls, 12, 11), Err(epoch_refusal(12, 11, 0)), "assigned later");
    assert!(open(&mut calls, 10, 12).is_ok());
    calls.settle(&call_of(CallSource(10), CallEpoch(12), 1, 0));
    assert_eq!(open(&mut calls, 10, 11), Err(epoch_refusal(10, 11, 12)));
    assert_eq!(open(&mut calls, 11, 12), Err(epoch_refusal(11, 12, 12)), "another source");
    assert_eq!(open(&mut calls, 10, 12).unwrap().settled, CallNumber(1), "repeated");
    assert_eq!(open(&mut calls, 10, 13).unwrap().settled, CallNumber(1), "resumed");
    let stolen = calls.open_as("another", CallSource(10), CallEpoch(20));
    assert_eq!(stolen, Err(epoch_refusal(10, 20, 13)));
    // The step owner has closed the source, and this shard was not told.
    let renewed = open(&mut calls, 14, 14).unwrap();
    assert_eq!((renewed.source, renewed.settled), (CallSource(14), CallNumber(0)));
}

#[test]
fn a_closed_source_is_forgotten_and_not_opened_by_a_late_request() {
    let mut calls = opened();
    let source = CallSource(10);
    let trainer = "trainer";
    assert_eq!(calls.close(trainer, CallEpoch(9)), Err(epoch_refusal(10, 9, 10)));
    assert_eq!(calls.close(trainer, CallEpoch(11)), Err(epoch_refusal(10, 11, 10)));
    assert_eq!(calls.close(trainer, EPOCH), Ok(()));
    assert_eq!(calls.close(trainer, EPOCH), Ok(()), "repeated");
    assert_eq!(calls.check(&call(1, 0)), Err(Refusal::UnknownCalls { source }));
    let source = CallSource(0);
    assert_eq!(calls.query(trainer), Err(Refusal::UnknownCalls { source }));
    let late = calls.open_as(trainer, CallSource(10), EPOCH);
    assert_eq!(late, Err(epoch_refusal(10, 10, 10)));
    calls.settle(&call(1, 0));
    let renewed = calls.open(trainer, CallEpoch(11)).unwrap();
    assert_eq!((renewed.source, renewed.settled), (CallSource(11), CallNumber(0)));
}

#[test]
fn a_shard_remembers_a_limited_number_of_coordinators_and_forgets_none_by_itself() {
    let mut calls = CallSources::new(PlantedBugs::default());
    let epoch = |index: usize| CallEpoch(1 + index as u64);
    for index in 0..CALL_SOURCES_MAX {
        assert!(calls.open(&format!("trainer {index}"), epoch(index)).is_ok());
    }
    let refused = calls.open("one more", epoch(CALL_SOURCES_MAX)).unwrap_err();
    assert!(matches!(refused, Refusal::Busy { limit: 64, .. }), "{refused:?}");
    let resumed = calls.open("trainer 5", epoch(CALL_SOURCES_MAX));
    assert_eq!(resumed.unwrap().source, CallSource(6));
    calls.close("trainer 7", epoch(7)).unwrap();
    assert!(calls.open("one more", epoch(CALL_SOURCES_MAX + 1)).is_ok());
}

#[test]
fn a_restore_goes_back_to_the_calls_of_the_checkpoint() {
    let mut calls = opened();
    calls.settle(&call(1, 0));
    let saved: Vec<CallSourceEntry> = calls.entries().map(|(_, entry)| entry.clone()).collect();
    calls.settle(&call(2, 1));
    calls.open("trainer", CallEpoch(12)).unwrap();
    calls.open("evaluator", CallEpoch(13)).unwrap();
    calls.roll_back(saved);
    let restored = calls.query("trainer").unwrap();
    assert_eq!((restored.source, restored.settled), (CallSource(10), CallNumber(1)));
    assert_eq!(restored.epoch, CallEpoch(14), "above every epoch from before");
    assert!(calls.query("evaluator").is_err());
    assert_eq!(calls.newest_epoch(), CallEpoch(14));
    calls.clear();
    assert!(calls.query("trainer").is_err());
}
