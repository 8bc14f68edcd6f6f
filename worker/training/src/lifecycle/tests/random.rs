//! Random trainings: every operation may fail at any time, and a hook in any of its methods.
//!
//! The properties:
//!
//! - The training ends, with a result and with every hook informed once.
//! - Nothing is asked of a worker that has not joined, and nothing but the wind-up after a failure.
//! - A gradient is pushed only with a token of its own, between its hooks.
//! - No step is saved twice, unless the servers have gone back.

use proptest::prelude::*;

use super::*;

/// The operations that may fail.
const PLACES: [&str; 9] =
    ["token", "pull", "push", "average", "publish", "save", "finish", "await end", "refresh"];

/// The methods of hooks that may fail.
const METHODS: [HookPlace; 9] = [
    HookPlace::Begin,
    HookPlace::Joined,
    HookPlace::BeforeStep,
    HookPlace::BeforePush,
    HookPlace::AfterStep,
    HookPlace::Saved,
    HookPlace::SaveFailed,
    HookPlace::Retrying,
    HookPlace::End,
];

fn error() -> impl Strategy<Value = Error> {
    let nan = Error::NonFinite { variable: "w".to_owned(), element: 0, value: f64::NAN };
    prop_oneof![
        3 => Just(lost()),
        3 => Just(busy()),
        2 => Just(timeout(None)),
        2 => Just(timeout(Some(3))),
        1 => Just(nan),
        1 => Just(Error::Fenced),
    ]
}

fn script() -> impl Strategy<Value = Script> {
    let checkpoints = proptest::option::of(prop_oneof![
        (1_u64..6).prop_map(Cadence::Steps),
        (1_u64..6).prop_map(|seconds| Cadence::Time(Duration::from_secs(seconds))),
    ]);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    let faults = proptest::collection::vec((0..PLACES.len(), 1_usize..12, error()), 0..10);
    let joins = proptest::collection::vec(
        prop_oneof![
            4 => (0_u64..8, any::<bool>()).prop_map(Ok),
            1 => error().prop_map(Err),
        ],
        0..4,
    );
    let ends = (1_u64..12, proptest::option::of(0_u64..12), proptest::option::of(0_u64..40));
    (checkpoints, flags, faults, joins, ends, any::<u64>()).prop_map(
        |(checkpoints, flags, faults, joins, ends, seed)| {
            let (is_chief, finish_for_all, final_checkpoint_on_error) = flags;
            let (last_step, fails_at, interrupt_at) = ends;
            let recover_for = Duration::from_secs(20);
            let settings = LifecycleSettings {
                is_chief,
                checkpoints,
                final_checkpoint_on_error,
                finish_for_all,
                ends_together: false,
                connect_timeout: Duration::ZERO,
                recover_for,
                non_finite_max: 3,
                seed,
            };
            let faults = faults.into_iter().map(|(place, call, error)| {
                // Only a push can be waited for again.
                let error = match (PLACES[place], error) {
                    ("push", error) => error,
                    (_, Error::Timeout { sequence: Some(_), .. }) => timeout(None),
                    (_, error) => error,
                };
                (PLACES[place], call, error)
            });
            let interrupt_at = interrupt_at.map(Duration::from_secs);
            let faults = faults.collect();
            let joins = joins.into();
            Script {
                settings,
                variables: replica_values::all_kinds(),
                last_step,
                faults,
                joins,
                fails_at,
                interrupt_at,
                ..Script::default()
            }
        },
    )
}

/// Checks the order of the events of a training with the hook `a`.
fn check(events: &[String]) -> Result<(), TestCaseError> {
    let mut is_joined = false;
    let mut has_token = false;
    let mut may_push = false;
    let mut has_failed = false;
    let mut asked = None;
    let mut saved = None;
    for event in events {
        let words: Vec<&str> = event.split(' ').collect();
        match words[0] {
            "join" => {
                prop_assert!(!has_failed, "a join after a failure: {events:?}");
                is_joined = true;
                has_token = false;
                may_push = false;
                asked = None;
                saved = None;
            }
            "token" => {
                prop_assert!(is_joined && !has_failed, "{events:?}");
                has_token = true;
                may_push = false;
            }
            "a.before_push" => {
                prop_assert!(has_token && !may_push, "a gradient without a token: {events:?}");
                may_push = true;
            }
            "push" => {
                prop_assert!(may_push && !has_failed, "{events:?}");
                has_token = false;
                may_push = false;
            }
            "average" => prop_assert!(is_joined && !has_failed, "{events:?}"),
            "publish" => prop_assert!(is_joined, "{events:?}"),
            "save" => {
                prop_assert!(is_joined, "{events:?}");
                asked = Some(words[2]);
            }
            "a.saved" => {
                prop_assert!(asked.is_some() && asked != saved, "saved twice: {events:?}");
                saved = asked;
            }
            "finish" | "await" | "refresh" => prop_assert!(is_joined && !has_failed, "{events:?}"),
            "leave" => is_joined = false,
            "a.failed" => has_failed = true,
            _ => {}
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    // T-1, T-2, T-3, T-4, T-5.
    #[test]
    fn a_training_ends_and_keeps_its_order_whatever_fails(
        script in script(),
        fails_in in proptest::option::weighted(0.3, (0..METHODS.len(), any::<bool>())),
    ) {
        let fails_in = fails_in.map(|(method, panics)| (METHODS[method], panics));
        let log = script.log.clone();
        let failing = Recorder { name: "f", log: log.clone(), fails_in };
        let played = script.play(vec![Recorder::boxed("a", &log), Box::new(failing)]);
        check(&played.events)?;
        let heard = played.count("a.end") + played.count("a.failed");
        let has_begun = played.count("a.begin");
        prop_assert_eq!((heard, has_begun), (1, 1), "{:?}", played.events);
        match &played.ended {
            Ok(ended) => {
                let is_alone = ended.reason == StopReason::Interrupted;
                prop_assert!(!(is_alone && ended.is_final), "{:?}", played.events);
                prop_assert_eq!(played.count("a.end"), 1);
            }
            Err(_) => prop_assert!(played.count("f.end") == 0 || played.count("a.end") == 1),
        }
    }
}
