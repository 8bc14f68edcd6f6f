//! A rendezvous that takes the members of another one over.

use pushpull_common::protocol::message::{RingEntered, RingJoin};
use pushpull_common::protocol::wire::List;

use super::{Formed, LEASE, Meeting, WINDOW, hello, join};

/// A request of a member of ring 9 of another rendezvous.
fn of_nine(index: u32, size: u32, gone: &[u32]) -> RingJoin {
    RingJoin {
        index: Some(index),
        size,
        epoch: 9,
        gone: List::new(gone.to_vec()).unwrap(),
        ..join(&format!("m{index}"))
    }
}

//
#[test]
fn a_ring_whose_members_have_all_come_forms_at_once() {
    let mut meeting = Meeting::new(1);
    let c = meeting.join(of_nine(2, 3, &[]));
    assert_eq!(meeting.waits(c), (1, 3, vec![0, 1]));
    let a = meeting.join(of_nine(0, 3, &[]));
    let late = meeting.join(RingJoin { size: 7, ..join("late") });
    assert_eq!(meeting.waits(late), (3, 3, vec![1]));
    let b = meeting.join(of_nine(1, 3, &[]));
    let indices = vec![0, 1, 2, 3];
    for (rank, member) in [a, b, c, late].into_iter().enumerate() {
        let expected = Formed { epoch: 10, rank: rank as u32, indices: indices.clone() };
        assert_eq!(meeting.formed(member), expected);
    }
    // The size of the taken ring is not that of the first.
    let later = meeting.join(RingJoin { size: 7, ..join("later") });
    assert_eq!(meeting.waits(later).0, 1);
}

//
#[test]
fn members_whose_processes_are_gone_are_not_waited_for() {
    let mut meeting = Meeting::new(1);
    let b = meeting.join(of_nine(1, 4, &[0]));
    assert_eq!(meeting.waits(b), (1, 3, vec![2, 3]));
    let c = meeting.join(of_nine(2, 4, &[0, 3, 3, 9_999]));
    assert_eq!(meeting.formed(c), Formed { epoch: 10, rank: 1, indices: vec![1, 2] });
    // A member that is here is not gone, and one may learn of more.
    let mut meeting = Meeting::new(1);
    let b = meeting.join(of_nine(1, 3, &[]));
    let c = meeting.join(of_nine(2, 3, &[1]));
    assert_eq!(meeting.waits(c), (2, 3, vec![0]));
    meeting.send(c, of_nine(2, 3, &[0]));
    assert_eq!(meeting.formed(b).indices, [1, 2]);
}

//
#[test]
fn a_majority_forms_after_the_window_and_a_minority_is_refused() {
    for (size, came, forms) in [(4, 3, true), (4, 2, false), (3, 2, true), (2, 1, false)] {
        let mut meeting = Meeting::new(1);
        let members: Vec<u64> =
            (0..came).map(|index| meeting.join(of_nine(index, size, &[]))).collect();
        meeting.pass(WINDOW);
        for &member in &members {
            if forms {
                assert_eq!(meeting.formed(member).epoch, 10);
                continue;
            }
            let expected = format!(
                "waited 3000 ms for more than half of the {size} members of ring 9: {came} have \
                 come"
            );
            assert_eq!(meeting.refusal(member).to_string(), expected);
        }
    }
}

// those that are gone are no part of the majority, but all of them together explain it.
#[test]
fn a_minority_that_lacks_one_is_refused_whoever_is_gone() {
    let mut meeting = Meeting::new(1);
    let a = meeting.join(of_nine(0, 4, &[1, 2]));
    assert_eq!(meeting.waits(a), (1, 2, vec![3]));
    meeting.pass(WINDOW);
    meeting.refusal(a);
}

#[test]
fn new_members_go_on_waiting_when_a_minority_is_refused() {
    let mut meeting = Meeting::new(4);
    let zombie = meeting.join(of_nine(0, 4, &[]));
    let new = ["a", "b", "c"].map(|id| meeting.join(join(id)));
    meeting.pass(WINDOW);
    meeting.refusal(zombie);
    assert_eq!(meeting.waits(new[0]), (3, 4, vec![3]));
    let d = meeting.join(join("d"));
    assert_eq!(meeting.formed(d), Formed { epoch: 10, rank: 3, indices: vec![0, 1, 2, 3] });
}

#[test]
fn a_majority_below_the_least_size_waits_for_others() {
    let mut meeting = Meeting::new(4);
    let members = [0, 1, 2].map(|index| meeting.join(of_nine(index, 4, &[])));
    meeting.pass(WINDOW + LEASE);
    assert_eq!(meeting.waits(members[0]), (3, 4, vec![3]));
    let other = meeting.join(join("other"));
    meeting.pass(WINDOW);
    assert_eq!(meeting.formed(other).indices, [0, 1, 2, 3]);
}

#[test]
fn indices_with_gaps_are_not_named_as_missing() {
    let mut meeting = Meeting::new(1);
    let a = meeting.join(of_nine(7, 3, &[]));
    assert_eq!(meeting.waits(a), (1, 3, vec![]));
    // Nor do members contradict each other about their ring.
    let b = meeting.join(of_nine(1, 4, &[]));
    let refusal = meeting.refusal(b).to_string();
    assert!(refusal.contains("differ in size: the server has \"3\""), "{refusal}");
    let newer = meeting.arrive(hello(5));
    meeting.send(newer, RingJoin { epoch: 11, ..of_nine(1, 2, &[]) });
    assert_eq!(meeting.waits(newer), (2, 2, vec![0]));
}

// a member that computes for longer than the window is waited for.
#[test]
fn members_that_compute_are_waited_for() {
    let mut meeting = Meeting::new(1);
    let a = meeting.join(of_nine(0, 4, &[]));
    let [b, c] = [1, 2].map(|_| {
        let computing = meeting.arrive(hello(2_000 + meeting.next));
        meeting.send(computing, RingEntered { epoch: 9 });
        computing
    });
    meeting.pass(10 * WINDOW);
    assert_eq!(meeting.waits(a), (1, 4, vec![1, 2, 3]));
    meeting.send(b, of_nine(1, 4, &[]));
    meeting.pass(10 * WINDOW);
    assert_eq!(meeting.waits(a), (2, 4, vec![2, 3]));
    // The window is that of members which nobody knows to live.
    meeting.send(c, of_nine(2, 4, &[]));
    meeting.pass(WINDOW / 2);
    assert_eq!(meeting.waits(a), (3, 4, vec![3]));
    meeting.pass(WINDOW / 2);
    assert_eq!(meeting.formed(a).indices, [0, 1, 2]);
    // One that is lost is not waited for.
    let mut meeting = Meeting::new(1);
    let members = [0, 1].map(|index| meeting.join(of_nine(index, 3, &[])));
    let computing = meeting.arrive(hello(9));
    meeting.send(computing, RingEntered { epoch: 9 });
    meeting.pass(2 * WINDOW);
    meeting.cut(computing);
    meeting.pass(WINDOW);
    assert_eq!(meeting.formed(members[0]).indices, [0, 1]);
}
