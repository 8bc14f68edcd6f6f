//! When a ring forms, who is in it, and what the others hear meanwhile.

use std::time::Duration;

use pushpull_common::protocol::Message;
use pushpull_common::protocol::limits::RING_SIZE_MAX;
use pushpull_common::protocol::message::{Heartbeat, RingEnd, RingJoiners, RingOver};

use super::{Formed, LEASE, Meeting, WINDOW, again, indexed, join};

fn regrouped(epoch: u64) -> RingOver {
    RingOver { epoch, end: RingEnd::Regrouped {} }
}

//
#[test]
fn the_first_ring_forms_when_its_size_has_come() {
    let mut meeting = Meeting::new(4);
    let c = meeting.join(indexed("c", 2));
    assert_eq!(meeting.waits(c), (1, 4, vec![0, 1, 3]));
    meeting.pass(LEASE / 16);
    let a = meeting.join(join("a"));
    assert_eq!(meeting.waits(a), (2, 4, vec![1, 3]));
    assert_eq!(meeting.waits(c), (2, 4, vec![1, 3]));
    // An index of a launcher has precedence over one that the rendezvous would assign.
    meeting.pass(LEASE / 16);
    let b = meeting.join(indexed("b", 0));
    assert_eq!(meeting.waits(a), (3, 4, vec![3]));
    meeting.pass(10 * LEASE);
    assert_eq!(meeting.waits(c), (3, 4, vec![3]));
    let d = meeting.join(join("d"));
    let indices = vec![0, 1, 2, 3];
    for (member, rank) in [(b, 0), (a, 1), (c, 2), (d, 3)] {
        let formed = Formed { epoch: 1, rank, indices: indices.clone() };
        assert_eq!(meeting.formed(member), formed);
    }
}

//
#[test]
fn members_that_wait_hear_so_every_quarter_of_a_lease() {
    let mut meeting = Meeting::new(4);
    let a = meeting.join(join("a"));
    meeting.waits(a);
    for _ in 0..8 {
        meeting.pass(LEASE / 4);
        assert_eq!(meeting.take(a).len(), 1);
    }
    meeting.send(a, Heartbeat {});
    assert!(matches!(meeting.received[&a][..], [Message::HeartbeatAnswer(_)]));
}

//
#[test]
fn members_that_come_and_go_are_announced_at_a_bounded_rate() {
    let mut meeting = Meeting::new(4);
    let a = meeting.join(join("a"));
    for _ in 0..1_000 {
        let b = meeting.join(join("b"));
        assert_eq!(meeting.waits(b).0, 2);
        meeting.close(b);
    }
    assert!(meeting.take(a).len() <= 2);
    meeting.pass(LEASE / 16);
    assert_eq!(meeting.waits(a), (1, 4, vec![1, 2, 3]));
}

#[test]
fn an_elastic_ring_forms_without_those_that_do_not_come_within_the_window() {
    let mut meeting = Meeting::new(2);
    let a = meeting.join(join("a"));
    meeting.pass(3 * WINDOW);
    assert_eq!(meeting.waits(a), (1, 2, vec![1, 2, 3]));
    let b = meeting.join(join("b"));
    meeting.pass(WINDOW / 2);
    let c = meeting.join(join("c"));
    meeting.pass(WINDOW - Duration::from_millis(1));
    assert_eq!(meeting.waits(a), (3, 2, vec![3]));
    meeting.pass(Duration::from_millis(1));
    for (rank, member) in [a, b, c].into_iter().enumerate() {
        let expected = Formed { epoch: 1, rank: rank as u32, indices: vec![0, 1, 2] };
        assert_eq!(meeting.formed(member), expected);
    }
    // With all of its members, it does not wait.
    let mut meeting = Meeting::new(2);
    meeting.four();
}

//
#[test]
fn members_that_come_and_go_prolong_the_window_only_so_far() {
    let mut meeting = Meeting::new(2);
    let a = meeting.join(join("a"));
    let b = meeting.join(join("b"));
    let begin = meeting.now;
    while meeting.open.contains(&a) && meeting.take(b).iter().all(|m| m.name() != "RingFormed") {
        let c = meeting.join(join("c"));
        meeting.pass(WINDOW / 2);
        meeting.close(c);
        assert!(meeting.now - begin < 5 * WINDOW, "the window does not end");
    }
    assert!(meeting.now - begin >= 4 * WINDOW);
}

#[test]
fn members_are_told_whose_process_serves_the_rendezvous() {
    let mut meeting = Meeting::new(1);
    let of = |id| super::RingJoin { size: 2, ..join(id) };
    let a = meeting.join(of("a"));
    let b = meeting.arrive(super::hello(super::SERVING));
    meeting.send(b, of("b"));
    let mut told = |member| match meeting.take(member).pop() {
        Some(Message::RingFormed(formed)) => formed.serving,
        other => panic!("no ring: {other:?}"),
    };
    assert_eq!([told(a), told(b)], [Some(1), Some(1)]);
}

//
#[test]
fn a_late_joiner_is_announced_and_comes_in_at_the_next_ring() {
    let mut meeting = Meeting::new(2);
    let [a, b, c, d] = meeting.four();
    let e = meeting.join(join("e"));
    assert_eq!(meeting.waits(e), (1, 5, vec![0, 1, 2, 3]));
    assert_eq!(meeting.take(b), [Message::from(RingJoiners { count: 1 })]);
    meeting.pass(LEASE);
    let f = meeting.join(join("f"));
    meeting.close(f);
    meeting.pass(LEASE);
    let told: Vec<Message> = [2, 1].map(|count| RingJoiners { count }.into()).into();
    assert_eq!(meeting.take(b), told);
    meeting.send(c, regrouped(1));
    for member in [a, b, c, d] {
        assert_eq!(meeting.end(member), regrouped(1));
    }
    for member in [(a, "a"), (b, "b"), (d, "d")] {
        meeting.send(member.0, again(member.1, 1));
    }
    meeting.pass(2 * LEASE);
    assert_eq!(meeting.waits(e), (4, 5, vec![2]));
    meeting.send(c, again("c", 1));
    for (rank, member) in [a, b, c, d, e].into_iter().enumerate() {
        let expected = Formed { epoch: 2, rank: rank as u32, indices: vec![0, 1, 2, 3, 4] };
        assert_eq!(meeting.formed(member), expected);
    }
}

//
#[test]
fn a_request_ends_the_ring_of_its_member_and_may_be_repeated() {
    let mut meeting = Meeting::new(1);
    let [a, b, c, d] = meeting.four();
    meeting.send(b, again("b", 1));
    assert_eq!(meeting.end(a), regrouped(1));
    meeting.send(b, again("b", 1));
    assert_eq!(meeting.waits(b), (1, 4, vec![0, 2, 3]));
    for member in [(a, "a"), (c, "c"), (d, "d")] {
        meeting.send(member.0, again(member.1, 1));
    }
    assert_eq!(meeting.formed(b).epoch, 2);
    // A repeated request that crosses the new ring asks for nothing.
    meeting.send(b, again("b", 1));
    meeting.pass(LEASE);
    assert!(meeting.is_silent(b));
}

//
#[test]
fn epochs_rise_above_all_that_members_name() {
    let mut meeting = Meeting::new(1);
    let [a, b, c, d] = meeting.four();
    let e = meeting.join(again("e", 40));
    meeting.send(a, regrouped(1));
    for member in [(a, "a"), (b, "b"), (c, "c"), (d, "d")] {
        meeting.send(member.0, again(member.1, 1));
    }
    assert_eq!(meeting.formed(e).epoch, 41);
}

#[test]
fn a_ring_that_has_lost_too_many_waits_for_others() {
    let mut meeting = Meeting::new(3);
    let [a, b, c, d] = meeting.four();
    meeting.close(c);
    meeting.close(d);
    meeting.send(a, again("a", 1));
    meeting.send(b, again("b", 1));
    meeting.pass(10 * LEASE);
    assert_eq!(meeting.waits(a), (2, 3, vec![2, 3]));
    let e = meeting.join(join("e"));
    assert_eq!(meeting.formed(e), Formed { epoch: 2, rank: 2, indices: vec![0, 1, 4] });
}

#[test]
fn members_that_are_all_lost_gather_as_for_a_first_ring() {
    let mut meeting = Meeting::new(1);
    for member in meeting.four() {
        meeting.close(member);
    }
    let b = meeting.join(join("b"));
    assert_eq!(meeting.waits(b).0, 1);
    let a = meeting.join(again("a", 1));
    meeting.pass(WINDOW);
    assert_eq!(meeting.formed(a), Formed { epoch: 2, rank: 0, indices: vec![0, 1] });
    assert_eq!(meeting.formed(b).rank, 1);
    // Another run, of another size.
    meeting.close(a);
    meeting.close(b);
    let only = meeting.join(super::RingJoin { size: 1, ..join("only") });
    assert_eq!(meeting.formed(only).epoch, 3);
}

//
#[test]
fn a_member_has_its_index_back_after_a_loss() {
    let mut meeting = Meeting::new(1);
    let [a, b, c, d] = meeting.four();
    meeting.close(b);
    for member in [(a, "a"), (c, "c"), (d, "d")] {
        meeting.send(member.0, again(member.1, 1));
    }
    assert_eq!(meeting.formed(c), Formed { epoch: 2, rank: 1, indices: vec![0, 2, 3] });
    let e = meeting.join(join("e"));
    let b = meeting.join(join("b"));
    for member in [(a, "a"), (c, "c"), (d, "d")] {
        meeting.send(member.0, again(member.1, 2));
    }
    let indices = vec![0, 1, 2, 3, 4];
    assert_eq!(meeting.formed(b), Formed { epoch: 3, rank: 1, indices: indices.clone() });
    assert_eq!(meeting.formed(e), Formed { epoch: 3, rank: 4, indices });
    // A launcher gives the index of a lost member to another id.
    meeting.close(b);
    let other = meeting.join(indexed("other", 1));
    let b = meeting.join(join("b"));
    for member in [(a, "a"), (c, "c"), (d, "d"), (e, "e")] {
        meeting.send(member.0, again(member.1, 3));
    }
    assert_eq!(meeting.formed(other).rank, 1);
    assert_eq!(meeting.formed(b).rank, 5);
}

//
#[test]
fn the_largest_ring_forms_and_one_more_is_refused() {
    let mut meeting = Meeting::new(1);
    let size = RING_SIZE_MAX as u32;
    let of = |at: u32| super::RingJoin { size, ..join(&format!("m{at}")) };
    let members: Vec<u64> = (0..size).map(|at| meeting.join(of(at))).collect();
    let last = meeting.formed(members[RING_SIZE_MAX - 1]);
    assert_eq!(last.rank, size - 1);
    assert_eq!(last.indices, (0..size).collect::<Vec<u32>>());
    let refused = meeting.join(of(size));
    let refusal = meeting.refusal(refused).to_string();
    assert_eq!(refusal, "too many members of the ring: the limit is 1024");
    // The place of a lost member goes to the next, since there is no other.
    meeting.close(members[7]);
    let other = meeting.join(of(size));
    for (at, &member) in (0..size).zip(&members).filter(|(at, _)| *at != 7) {
        meeting.send(member, super::RingJoin { epoch: 1, ..of(at) });
    }
    assert_eq!(meeting.formed(other).rank, 7);
}
