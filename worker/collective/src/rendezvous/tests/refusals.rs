//! The peers that are refused, each with its reason.

use pushpull_common::identity::Identity;
use pushpull_common::ids::Incarnation;
use pushpull_common::protocol::limits::RING_SIZE_MAX;
use pushpull_common::protocol::message::{
    AuthOffer, FeatureOffer, Finish, Hello, RingEnd, RingFormed, RingJoin, RingLinked, Role,
};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{Features, Message};

use super::super::admission::{CONNECTIONS_MAX, EPOCH_MAX};
use super::{Meeting, again, config, hello, indexed, join};
use crate::rendezvous::RendezvousConfig;

//
#[test]
fn a_stranger_is_refused_by_its_hello() {
    let requires = FeatureOffer { has: Features::ALL, requires: Features(1 << 63) };
    let identity = Identity::new().with("dtype", "f64").to_wire();
    let table = [
        (
            Hello { version_oldest: 7, version_newest: 9, ..hello(1) },
            "the server speaks protocol versions 1 to 1 only",
        ),
        (Hello { features: requires, ..hello(1) }, "this side requires feature 63"),
        (
            Hello {
                auth: Some(AuthOffer { token: Text::clipped("trainers"), nonce: [1; 32] }.into()),
                ..hello(1)
            },
            "messages of kind 1 are not supported: this server does not authenticate",
        ),
        (Hello { role: Role::Worker {}, ..hello(1) }, "role 1 may not send messages of kind 1"),
        (
            Hello { job: Text::clipped("other"), ..hello(1) },
            "the identities differ in job: the server has \"ring\"",
        ),
        (Hello { identity, ..hello(1) }, "the identities differ in dtype: the server has \"f32\""),
    ];
    for (hello, expected) in table {
        let mut meeting = Meeting::new(1);
        let stranger = meeting.arrive(hello);
        let refusal = meeting.refusal(stranger).to_string();
        assert!(refusal.starts_with(expected), "{refusal}");
    }
}

//
#[test]
fn a_request_that_contradicts_others_is_refused() {
    let sized = |id, size| RingJoin { size, ..join(id) };
    let table = [
        (join(""), "the member has no id"),
        (indexed("b", 4), "member \"b\" is outside the indices 0 to 3"),
        (
            RingJoin { epoch: 1, index: Some(RING_SIZE_MAX as u32), ..join("b") },
            "member \"b\" is outside the indices 0 to 1023",
        ),
        (indexed("b", 2), "member \"b\" on host-b cannot be \"a\" on host-a"),
        (sized("b", 3), "the identities differ in size: the server has \"4\""),
        (sized("b", 0), "the identities differ in size: the server has \"1 to 1024\""),
        (sized("b", 1025), "the identities differ in size: the server has \"1 to 1024\""),
        (again("b", EPOCH_MAX + 1), "epoch 9223372036854775808 is above the limit"),
    ];
    for (second, expected) in table {
        let mut meeting = Meeting::new(4);
        let a = meeting.join(indexed("a", 2));
        let b = meeting.join(second);
        let refusal = meeting.refusal(b).to_string();
        assert!(refusal.contains(expected), "{refusal}");
        assert_eq!(meeting.waits(a), (1, 4, vec![0, 1, 3]));
    }
}

//
#[test]
fn the_highest_epoch_has_a_successor() {
    let mut meeting = Meeting::new(1);
    let of = |id, epoch| RingJoin { size: 1, ..again(id, epoch) };
    let a = meeting.join(of("a", EPOCH_MAX));
    assert_eq!(meeting.formed(a).epoch, EPOCH_MAX + 1);
    meeting.send(a, of("a", EPOCH_MAX + 1));
    assert_eq!(meeting.formed(a).epoch, EPOCH_MAX + 2);
}

#[test]
fn the_index_of_a_member_of_the_running_ring_is_taken() {
    let mut meeting = Meeting::new(4);
    meeting.four();
    let other = meeting.join(indexed("other", 1));
    let refusal = meeting.refusal(other).to_string();
    assert_eq!(
        refusal,
        "task 1 of job \"ring\" is not accepted: member \"other\" on host-other cannot be \"b\" on \
         host-b"
    );
}

#[test]
fn a_member_keeps_its_id_and_names_its_own_ring() {
    let mut meeting = Meeting::new(1);
    let [a, b, c, _] = meeting.four();
    meeting.send(a, again("other", 1));
    let refusal = meeting.refusal(a).to_string();
    assert!(refusal.contains("member \"a\" cannot be \"other\" as well"), "{refusal}");
    meeting.send(b, again("b", 2));
    let refusal = meeting.refusal(b).to_string();
    assert!(refusal.contains("the member's last ring was 1, not 2"), "{refusal}");
    let RingEnd::Lost { rank: 0, .. } = meeting.end(c).end else { panic!("the first end") };
}

// The rendezvous of a launcher knows no facts of the program.
#[test]
fn members_agree_on_the_facts_of_the_first() {
    let with = |build: &str, incarnation| Hello {
        identity: Identity::new().with("build", build).with_free("note", build).to_wire(),
        incarnation: Incarnation(incarnation),
        ..hello(1)
    };
    let mut meeting = Meeting::with(RendezvousConfig { serving: None, ..config(4) });
    // A peer without a place decides nothing.
    meeting.arrive(with("3", 3));
    let b = meeting.arrive(with("2", 2));
    let a = meeting.arrive(with("1", 1));
    meeting.send(a, join("a"));
    meeting.send(b, join("b"));
    let refusal = meeting.refusal(b).to_string();
    assert!(refusal.contains("differ in build: the server has \"1\""), "{refusal}");
    let c = meeting.arrive(with("2", 4));
    meeting.refusal(c);
    // Once nobody is left, another build may meet here.
    meeting.close(a);
    let c = meeting.arrive(with("2", 4));
    meeting.send(c, join("c"));
    assert_eq!(meeting.waits(c).0, 1);
}

// A member that differs is refused alone, before it can perform another operation than the others.
#[test]
fn a_late_member_with_other_facts_is_refused_alone() {
    let facts = || Identity::new().with("dtype", "f32").with("lease", "4000 ms");
    let table = [
        (facts().with("lease", "5000 ms"), "lease", "4000 ms", "5000 ms"),
        (facts().with("batch size", "32"), "batch size", "absent", "32"),
        (Identity::new().with("dtype", "f32"), "lease", "4000 ms", "absent"),
        (facts().with("dtype", "f64"), "dtype", "f32", "f64"),
    ];
    for serving in [None, Some(Incarnation(1))] {
        for (identity, name, ours, theirs) in &table {
            let config = RendezvousConfig { serving, identity: facts(), ..config(1) };
            let mut meeting = Meeting::with(config);
            let hello_with = |identity: &Identity, incarnation| Hello {
                identity: identity.to_wire(),
                ..hello(incarnation)
            };
            let of_ring = ["a", "b", "c", "d"].map(|id| {
                let connection = meeting.arrive(hello_with(&facts(), meeting.next));
                meeting.send(connection, join(id));
                connection
            });
            of_ring.iter().for_each(|&member| _ = meeting.take(member));
            let late = meeting.arrive(hello_with(identity, 9));
            if meeting.open.contains(&late) {
                meeting.send(late, join("late"));
            }
            let refusal = meeting.refusal(late).to_string();
            let words = [
                format!("differ in {name}: the server has {ours:?} "),
                format!("this side has {theirs:?} "),
            ];
            assert!(words.iter().all(|words| refusal.contains(words)), "{refusal}");
            // Nor does it take the place of a member.
            let other = meeting.arrive(hello_with(identity, 10));
            assert!(!meeting.open.contains(&other));
            assert!(of_ring.iter().all(|&member| meeting.is_silent(member)));
        }
    }
}

//
#[test]
fn messages_that_are_not_those_of_a_member_are_refused() {
    let formed =
        RingFormed { rendezvous: 1, epoch: 1, rank: 0, size: 1, lease_ms: 1, serving: None };
    let messages =
        [Finish {}.into(), RingLinked { memory: 0 }.into(), hello(1).into(), formed.into()];
    for message in messages {
        let mut meeting = Meeting::new(4);
        let message: Message = message;
        let a = meeting.arrive(hello(1));
        let kind = message.kind();
        meeting.send(a, message.clone());
        let expected = format!("role 7 may not send messages of kind {kind}");
        assert_eq!(meeting.refusal(a).to_string(), expected);
        // A closed connection is not heard any more.
        meeting.send(a, message);
        meeting.close(a);
        assert!(meeting.is_silent(a));
    }
}

//
#[test]
fn there_is_a_limit_of_connections() {
    let mut meeting = Meeting::new(4);
    for at in 0..CONNECTIONS_MAX {
        meeting.arrive(hello(at as u64));
    }
    let refused = meeting.arrive(hello(0));
    let refusal = meeting.refusal(refused).to_string();
    assert_eq!(refusal, "too many connections to the rendezvous: the limit is 2048");
    meeting.close(1);
    let a = meeting.arrive(hello(0));
    assert!(meeting.is_silent(a));
}
