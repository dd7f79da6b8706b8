import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;

/** Java's heap: a map that is built, searched, thinned out; arrays; garbage; threads. */
public final class Heap {
    private static String hex(byte[] bytes) {
        StringBuilder text = new StringBuilder();
        for (byte one : bytes) text.append(String.format("%02x", one));
        return text.toString();
    }

    private static byte[] filled(int seed) {
        byte[] bytes = new byte[64 << 10];
        for (int i = 0; i < bytes.length; i += 16) bytes[i] = (byte) (i * 31 + seed);
        return bytes;
    }

    public static void main(String[] arguments) throws Exception {
        HashMap<Integer, String> map = new HashMap<>();
        for (int i = 0; i < 400_000; i++) map.put(i, "value " + i + " of many, and some more text to hold");
        List<byte[]> arrays = new ArrayList<>();
        for (int i = 0; i < 1200; i++) arrays.add(filled(i));
        // Garbage, so that the collector runs and moves things.
        long garbage = 0;
        for (int i = 0; i < 3000; i++) garbage += new byte[100_000 + i].length;
        for (int i = 0; i < 400_000; i += 3) map.remove(i);
        System.gc();
        MessageDigest digest = MessageDigest.getInstance("SHA-256");
        for (int i = 0; i < 400_000; i++) {
            String value = map.get(i);
            if (value != null) digest.update(value.getBytes("UTF-8"));
        }
        System.out.println("map " + map.size() + " " + hex(digest.digest()) + " " + garbage);
        Thread[] threads = new Thread[4];
        String[] answers = new String[threads.length];
        for (int t = 0; t < threads.length; t++) {
            int mine = t;
            threads[t] = new Thread(() -> {
                try {
                    MessageDigest part = MessageDigest.getInstance("SHA-256");
                    for (int i = mine; i < arrays.size(); i += answers.length) part.update(arrays.get(i));
                    answers[mine] = hex(part.digest());
                } catch (java.security.NoSuchAlgorithmException error) {
                    answers[mine] = error.toString();
                }
            });
            threads[t].start();
        }
        for (Thread thread : threads) thread.join();
        System.out.println(String.join("\n", answers));
    }
}
